"""Every architecture is found by its name and has the size its paper gives."""

import importlib
import re

import pytest
import torch

from anycostfl import models
from anycostfl.errors import UnknownNameError

PARAMETERS = {"cnn": 1_663_370, "vgg9": 3_491_530}
OUTPUTS = {  # of one sample, where it is not one of ten classes
    "air_cnn": (1,),
    "char_lstm": (80, 72),
    "char_transformer": (80, 72),
    "har_cnn": (6,),
    "lstm": (80,),
    "mlp": (2,),
    "unet": (6, 48, 48),
}


@pytest.mark.parametrize("name", models.names())
def test_maps_its_example_to_outputs(name: str) -> None:
    spec = models.load(name)
    with torch.no_grad():
        assert spec.build()(spec.example(3)).shape == (3, *OUTPUTS.get(name, (10,)))


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_count_is_the_papers(name: str, count: int) -> None:
    assert sum(p.numel() for p in models.load(name).build().parameters()) == count


def test_a_file_that_names_a_number_of_parameters_names_that_of_its_model() -> None:
    named = {}
    for name in models.names():
        text = importlib.import_module(f"anycostfl.models.{name}").__doc__ or ""
        if found := re.search(r"([\d,]+) parameters", text):
            named[name] = int(found[1].replace(",", ""))
    assert named.keys() >= PARAMETERS.keys()
    built = {name: models.load(name).build() for name in named}
    assert named == {name: sum(p.numel() for p in m.parameters()) for name, m in built.items()}


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="vgg9"):
        models.load("vgg99")


@pytest.mark.parametrize("name", models.names())
def test_examples_do_not_look_alike_before_training(name: str) -> None:
    spec = models.load(name)
    torch.manual_seed(0)
    with torch.no_grad():
        assert spec.build()(spec.example(64)).std(0).mean() > 1e-3
