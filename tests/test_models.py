"""Every architecture is found by its name and has the size its paper gives."""

import pytest
import torch

from anycostfl import models
from anycostfl.errors import UnknownNameError

PARAMETERS = {"cnn": 1_663_370, "vgg9": 3_491_530}


@pytest.mark.parametrize("name", models.names())
def test_maps_its_example_to_classes(name: str) -> None:
    spec = models.load(name)
    classes = 80 if name == "lstm" else 10
    with torch.no_grad():
        assert spec.build()(spec.example(3)).shape == (3, classes)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_count_is_the_papers(name: str, count: int) -> None:
    assert sum(p.numel() for p in models.load(name).build().parameters()) == count


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="vgg9"):
        models.load("vgg99")


@pytest.mark.parametrize("name", models.names())
def test_examples_do_not_look_alike_before_training(name: str) -> None:
    spec = models.load(name)
    torch.manual_seed(0)
    with torch.no_grad():
        assert spec.build()(spec.example(64)).std(0).mean() > 1e-3
