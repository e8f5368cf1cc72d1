"""The map from the paper to the code leads somewhere, and what the README shows works."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, cast, get_type_hints

import click
import pytest
import torch
from torch import nn
from typer.main import get_command

from anycostfl import ElasticModel, config, methods, models, save_elastic, tasks
from anycostfl.cli import build_app
from anycostfl.config import Config
from anycostfl.fleets.attackers import ATTACKS
from anycostfl.records.journal import SCHEMA
from anycostfl.records.round import DeviceRecord
from anycostfl.wire.messages import PROTOCOL, TOO_OLD

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| .+ \| `(\S+)` \| `(\S+)` \|$", (ROOT / "docs/paper-map.md").read_text(), re.M
)


def resolve(path: str) -> object:
    """Import the longest module prefix of a dotted path, then walk its attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[cut:], module)
    raise ModuleNotFoundError(path)


def test_the_map_has_rows() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("function", "test"), ROWS)
def test_every_row_of_the_paper_map_exists(function: str, test: str) -> None:
    assert resolve(function) is not None
    assert callable(resolve(test))


def test_make_targets_named_in_the_readme_exist() -> None:
    named = set(re.findall(r"(?:^|\$ |`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.M))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert named
    assert named <= targets


def test_the_configuration_document_has_every_key_and_no_other() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    text = text[text.index("## Keys") : text.index("## Names")]
    parts = re.split(r"^\*\*`\[(\w+)\]`\*\*", text, flags=re.M)[1:]
    described = dict(zip(parts[::2], parts[1::2], strict=True))
    hints = get_type_hints(Config)
    sections = {f.name: hints[f.name] for f in fields(Config) if f.name != "summary"}
    assert described.keys() == sections.keys()
    for name, kind in sections.items():
        rows = re.findall(r"^\| (`.+?) \|", described[name], re.M) or [described[name]]
        keys = re.findall(r"`([a-z0-9_]+)`", " ".join(rows))
        own = {f.name for f in fields(kind)} if is_dataclass(kind) else set[str]()
        assert own <= set(keys), name
        assert len(rows) == 1 or own == set(keys), name


def test_the_reference_names_all_there_is() -> None:
    pages = ("docs/configuration.md", "docs/run-directory.md", "docs/attacks.md")
    text = "".join((ROOT / page).read_text() for page in pages)
    known = [*config.preset_names(), *config.profile_names(), *models.names(), *methods.names()]
    known += tasks.names()
    for name in [*known, *(f.name for f in fields(DeviceRecord)), *ATTACKS]:
        assert f"`{name}`" in text, name


def test_the_documents_name_the_formats_of_today() -> None:
    wire = (ROOT / "docs/wire-format.md").read_text()
    assert f"(`src/anycostfl/wire`): protocol {PROTOCOL}." in wire
    assert TOO_OLD in wire
    assert f"`schema` ({SCHEMA})" in (ROOT / "docs/run-directory.md").read_text()


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MOST_WORDS, LONGEST_SENTENCE = 2500, 45


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page without code, tables, headings and the targets of links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "x", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s?)", text):
        if not block.lstrip().startswith(("#", "|", "![", "<")):
            yield from re.split(r"(?<=[.!?:])[\s*)]+(?=\W*[A-Z0-9α-ωx])", block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= MOST_WORDS
    long = [s for s in sentences(text) if len(s.split()) > LONGEST_SENTENCE]
    assert not long


def test_the_readme_and_the_claims_fit_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len((ROOT / "docs/results/README.md").read_text().split()) <= 1500


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every `anycostfl …` line of the pages that people copy from."""
    guides = [ROOT / "README.md", ROOT / "docs/deploy.md", *ROOT.glob("docs/howto/*.md")]
    for page in [*guides, *ROOT.glob("docs/tutorials/*.md")]:
        text = re.sub(r"\\\n\s*", "", page.read_text())  # lines that go on
        for line in re.findall(r"^\w* *\$ (?:\S+=\S+ )*(?:\S*/)?anycostfl (.+)$", text, re.M):
            words = shlex.split(line, comments=True)
            if words and "…" not in line:
                yield page.name, words


@pytest.mark.parametrize(("page", "words"), list(commands()))
def test_commands_that_people_copy_are_valid(page: str, words: list[str]) -> None:
    """Names and options exist and take these values; tutorials are executed besides."""
    app = cast(click.Group, get_command(build_app()))
    if words == ["--version"]:
        return
    name, command, rest = app.resolve_command(click.Context(app), words)
    assert command is not None, page
    command.make_context(name, rest)  # raises UsageError


def test_documents_point_at_files_that_exist() -> None:
    for document in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_the_python_of_the_guides_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks, top to bottom, on something small."""

    def my_training(module: nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)

    monkeypatch.chdir(tmp_path)
    x = torch.randn(260, 6)
    y = (x[:, 0] > 0).long()
    small = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))
    resnet = models.load("resnet18").build()
    names: dict[str, Any] = {
        "F": nn.functional,
        "module": small,
        "x": x[:200],
        "y": y[:200],
        "xt": x[200:],
        "yt": y[200:],
        "ids": torch.arange(200) % 5,
        "my_training": my_training,
    }
    net = ElasticModel(resnet, torch.randn(2, 3, 32, 32))
    save_elastic(net, tmp_path / "all.safetensors", model="resnet18")
    pages = ("README.md", *(f"docs/howto/{name}.md" for name in ("elastic", "compress", "export")))
    text = "".join((ROOT / page).read_text() for page in pages)
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 5
    for block in blocks:
        exec(block, names)  # noqa: S102
        names["module"] = resnet  # of the blocks after the first
    assert [record.round for record in names["result"].records] == list(range(20))
    assert names["result"].records[-1].metric > 0.7
    assert (tmp_path / "report.html").stat().st_size > 0
    assert len(names["smaller"]) < len(names["payload"])
