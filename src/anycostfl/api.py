"""From Python, without any file: train a module on a task, and compare methods.

for record in run(model=module, task=task, method="anycostfl+", rounds=20, seed=0):
print(record.round, record.metric, record.energy_j)
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from anycostfl import config as configs
from anycostfl import experiment as experiments
from anycostfl.config import Config
from anycostfl.data.prepare import PreparedModule
from anycostfl.data.samples import Dataset, Tree
from anycostfl.derive import derive_config, find_learning_rate
from anycostfl.device import Training
from anycostfl.errors import ConfigError, TaskError
from anycostfl.experiment import Experiment, build_experiment, elastic
from anycostfl.export import cut
from anycostfl.export.formats import FORMATS, write
from anycostfl.export.trained import TrainedModel, inference_rule, load_sorted
from anycostfl.planning.draw import FleetSpec
from anycostfl.records.round import RoundRecord, summarise
from anycostfl.report import write_page
from anycostfl.rounds import ServerState, deployed, first_state
from anycostfl.runs import begin
from anycostfl.simulate import simulate_on
from anycostfl.tasks import Task

Given = Mapping[str, Any] | None


class Run:
    """A training run on a simulated fleet: iterate over its rounds, then look at what came out.

    Whatever is asked of it before its first round runs all of them. In a notebook it shows a
    progress bar, and itself as a table.
    """

    def __init__(self, experiment: Experiment, dataset: Dataset, workers: int = 1) -> None:
        self.config = experiment.config
        self._experiment, self._dataset = experiment, dataset
        self._rounds = simulate_on(experiment, dataset, workers=workers)
        self._records: list[RoundRecord] = []
        self._seconds: list[Mapping[str, float]] = []
        self._state: ServerState = first_state(experiment)
        self._show = notebook_bar(self.config.run.rounds)

    def __iter__(self) -> Iterator[RoundRecord]:
        """Rounds that are done, then the others as they are run."""
        seen = 0
        while seen < len(self._records) or self._advance():
            yield self._records[seen]
            seen += 1

    def finish(self) -> Run:
        """Run all rounds that are left."""
        while self._advance():
            pass
        return self

    @property
    def records(self) -> Sequence[RoundRecord]:
        """What happened in every round."""
        self._begin()
        return tuple(self._records)

    @property
    def model(self) -> nn.Module:
        """The trained module, in evaluation mode, for inputs as the task has them."""
        self._begin()
        net, how = self._experiment.net, self._experiment.task.preparation
        net.load(deployed(self._state))
        module = copy.deepcopy(net.module).eval()
        return PreparedModule(module, how, self._dataset.fitted).eval() if how else module

    def summary(self) -> dict[str, object]:
        """The metric and what it cost, as one flat table."""
        run = self.config.run
        return summarise(run.method, self.config.metric, run.target, self.records)

    def save(self, folder: Path | str) -> Path:
        """Write a run directory: configuration, journal, checkpoint and page."""
        target, records = Path(folder), self.records
        writer = begin(target, self.config)
        with writer.exclusive():
            for record, seconds in zip(records, self._seconds, strict=True):
                writer.append(record, seconds)
            writer.checkpoint(self._state.checkpoint())
        write_page([target])
        return target

    def report(self, path: Path | str = "report.html") -> Path:
        """Write the page of the run, one HTML file."""
        return write_report({self.config.run.method: self}, Path(path))

    def export(self, path: Path | str, *, alpha: float = 1.0, int8: bool = False) -> Path:
        """Write the model at a width α, compared with PyTorch.

        The name ends in .onnx (with int8=True for 8 bits), .pte, .pt2 or .safetensors. Inputs of
        the file are raw ones, as the task has them; .safetensors holds the weights alone.
        """
        target = Path(path)
        formats = {kind.suffix: name for name, kind in FORMATS.items() if name != "int8"}
        if target.suffix not in formats:
            raise ConfigError([f"export: given {target}, must end in {', '.join(formats)}"])
        if int8 and target.suffix != ".onnx":
            raise ConfigError([f"export: given {target} with int8=True, must end in .onnx"])
        trained = self._trained()
        write(trained, cut(trained, alpha), target, "int8" if int8 else formats[target.suffix])
        return target

    def _trained(self) -> TrainedModel:
        records, samples, rule = self.records, self._dataset.train, inference_rule(self.config)

        def example(batch: int) -> Tree:
            return samples.take(slice(0, batch)).inputs

        net = elastic(copy.deepcopy(self._experiment.net.module), example(2), rule)
        order = load_sorted(net, deployed(self._state), self.config, records)
        return TrainedModel(
            config=self.config,
            rounds=len(records),
            net=net,
            order=order,
            remarks=(),
            task=self._experiment.task,
            example=example,
            raw=self._experiment.task.dataset,
            data=lambda: self._dataset,
        )

    def _repr_html_(self) -> str:
        return table_html(self.summary().items())

    def _begin(self) -> None:
        if not self._records:
            self.finish()

    def _advance(self) -> bool:
        """Run one more round, if any is left."""
        result = next(self._rounds, None)
        if result is None:
            return False
        self._state = result.state
        self._records.append(result.record)
        self._seconds.append(result.seconds)
        self._show(len(self._records), self.config.metric.show(result.record.metric))
        return True


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several methods on the same task, fleet, budgets and seed; iterate over names and runs."""

    runs: Mapping[str, Run] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Run]]:
        """Every method with its finished run."""
        for method, one in self.runs.items():
            yield method, one.finish()

    def table(self) -> list[dict[str, object]]:
        """One summary for each method."""
        return [one.summary() for _, one in self]

    def report(self, path: Path | str = "comparison.html") -> Path:
        """Write one page that compares the methods."""
        return write_report(dict(self), Path(path))

    def _repr_html_(self) -> str:
        rows = self.table()
        names = [*rows[0]] if rows else []
        return table_html((name, *(row[name] for row in rows)) for name in names)


def run(
    config: Config | None = None,
    *,
    model: nn.Module | None = None,
    task: Task | None = None,
    method: str = "anycostfl+",
    rounds: int = 20,
    seed: int = 0,
    fleet: FleetSpec | Given = None,
    budgets: Given = None,
    training: Training | Given = None,
    target: float | None = None,
    workers: int = 1,
) -> Run:
    """Train a module on a task by a fleet, or run what a configuration describes.

    There is one device for each owner of samples. What is not given is derived from model and task.

    Args:
        config: A configuration such as `load_preset` returns, instead of all that follows.
        model: The module to train; it is copied.
        task: Samples, loss and metric.
        method: A federated method by its name.
        rounds: How many rounds.
        seed: Decides everything that is drawn.
        fleet: Fields of `FleetSpec` that differ from the derived fleet, or all of them.
        budgets: `latency_s` and `energy_j` (a number, or the ends of a range) of each device in a
            round.
        training: Fields of `Training`, or all of them; without `learning_rate`, some are tried.
        target: A value of the metric to reach.
        workers: Processes; 0 is one per core. Several need `if __name__ == "__main__":`.
    """
    if config is not None:
        if model is not None or task is not None:
            raise TaskError("run: given a configuration and a model or task, must be one or other")
        config = experiments.resolve(config)
        dataset = experiments.load_data(config)
        return Run(build_experiment(config, dataset), dataset, workers)
    if not isinstance(model, nn.Module) or not isinstance(task, Task):
        raise TaskError("run: must have model=nn.Module and task=Task, or a configuration")
    about = configs.Run(rounds=rounds, target=target, method=method, seed=seed)
    dataset = experiments.prepared(task)
    net = elastic(copy.deepcopy(model), dataset.train.take(slice(0, 2)).inputs, "fast")
    derived = derive_config(
        task, net, dataset, run=about, fleet=fleet, budgets=budgets, training=training
    )
    config = experiments.resolve(derived)
    experiment = build_experiment(config, dataset, task=task, net=net)
    if not isinstance(training, Training) and "learning_rate" not in (training or {}):
        rate = find_learning_rate(experiment, dataset)
        experiment = experiment.with_training(learning_rate=rate)
    return Run(experiment, dataset, workers)


def compare(
    *, methods: Sequence[str] = ("anycostfl+", "anycostfl", "fedavg"), **options: Any
) -> Comparison:
    """Several methods on equal terms; the options are those of `run`.

    Each method trains a copy of the same module, at the learning rate that is best for it.
    """
    if unknown := {"method", "config"} & options.keys():
        raise TaskError(f"compare: {', '.join(unknown)} has no effect; methods names the methods")
    return Comparison({method: run(method=method, **options) for method in methods})


# --- pages and tables -----------------------------------------------------------------------------


def write_report(runs: Mapping[str, Run], path: Path) -> Path:
    """One page about some runs."""
    with tempfile.TemporaryDirectory() as folder:
        saved = [one.save(Path(folder, name.replace("/", "-"))) for name, one in runs.items()]
        write_page(saved, path)
    return path


def table_html(rows: Any) -> str:
    """Rows as an HTML table."""
    lines = (
        "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row) for row in rows if row[1] != {}
    )
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def notebook_bar(rounds: int) -> Callable[[int, str], None]:
    """Shows progress where this runs in a notebook, and nothing elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell":
        return lambda _done, _metric: None
    display = importlib.import_module("IPython.display")
    bar = display.display(display.HTML(""), display_id=True)

    def show(done: int, metric: str) -> None:
        text = f"round {done} of {rounds}, {escape(metric)}"
        bar.update(display.HTML(f"<progress value={done} max={rounds}></progress> {text}"))

    return show
