"""The round (Sec. III-A), top to bottom: sort, plan, shrink, train, compress, aggregate.

`play` is the paper's algorithm; `rounds.py` is the server's half of a round, `workers.py` the
devices'. Every random number comes from a generator seeded by (seed, round, device, purpose), and
payloads are aggregated in the order of the cohort, so that neither the number of workers nor their
order changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator

from anycostfl import attacks
from anycostfl.aggregate import advance
from anycostfl.config import Config, load_profile
from anycostfl.coupling import tensors_of
from anycostfl.experiment import prepare
from anycostfl.fleet import choose, draw_cohort
from anycostfl.gate import Bench, benched
from anycostfl.methods import State
from anycostfl.rounds import accepted, assign, describe, evaluate, is_due, receive, screen
from anycostfl.runs import Snapshot, Turn, Turns
from anycostfl.types import RoundRecord
from anycostfl.workers import one_thread, open_executor


def run(config: Config, *, workers: int = 1) -> Iterator[RoundRecord]:
    """Simulate an experiment, one record per round."""
    for turn in play(config, workers=workers):
        yield turn.record


def play(config: Config, *, workers: int = 1, start: Snapshot | None = None) -> Turns:
    """The training procedure of the paper, round after round."""
    side = prepare(config)
    net, method = side.net, side.method
    profiles = {name: load_profile(name) for name in config.fleet.profiles}
    limits = config.limits_of(config.run.method)
    everyone = range(config.fleet.devices)
    liars = attacks.liars(config.attack, config.fleet.devices, config.run.seed)
    memories: dict[int, State] = {}
    velocity: State = {}
    bench = Bench()
    if start is not None:
        net.load(start.state)
        memories, velocity, bench = dict(start.memories), start.velocity, start.bench

    with one_thread(), open_executor(side, workers) as executor:
        for number in range(start.round if start else 0, config.run.rounds):
            if method.sorts_channels:
                order = net.sort_channels()
                memories = {i: net.permute(memory, order) for i, memory in memories.items()}
                velocity = net.permute(velocity, order) if velocity else velocity

            cohort = draw_cohort(
                config.fleet,
                seed=config.run.seed,
                round_index=number,
                samples=side.sample_counts().numpy(),
                profiles=profiles,
                ready=bench.free(everyone, number),
            )
            strategies = method.plan(cohort.devices, config.workload, limits)
            assignments = assign(config, side, cohort, strategies, number)

            replies = executor.perform([a.job(memories, liars) for a in assignments])
            outcomes = receive(method, assignments, replies)
            outcomes = screen(method, outcomes, config.aggregation, tensors_of(net.module), bench)
            updates = accepted(method, outcomes, config.aggregation)
            state, velocity = advance(tensors_of(net.module), updates, config.aggregation, velocity)
            net.load(state)
            memories |= {o.reply.device: o.reply.memory for o in outcomes if o.reply.memory}

            accuracy = evaluate(side, executor) if is_due(config, number) else None
            drawn = choose(config.fleet, everyone, seed=config.run.seed, round_index=number)
            devices = describe(config, cohort, strategies, outcomes)
            record = RoundRecord(number, accuracy, devices + benched(bench, drawn.tolist(), number))
            bench = bench.after(record, config.gate)
            state = {name: t.detach().clone() for name, t in tensors_of(net.module).items()}
            yield Turn(record, Snapshot(number + 1, state, dict(memories), velocity, bench))
