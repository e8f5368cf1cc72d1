"""The round (Sec. III-A), top to bottom: sort, plan, shrink, train, compress, aggregate.

`play` is the paper's algorithm; `server.py` and `rounds.py` are the server's half of a round,
`workers.py` is the devices'. Every random number of a round comes from a generator seeded by
(seed, round, device, purpose), and payloads are aggregated in the order of the cohort, so that
neither the number of workers nor their order changes a result.
"""

from __future__ import annotations

from collections.abc import Iterator

from anycostfl import attacks
from anycostfl.config import Config, profiles_of
from anycostfl.experiment import settle
from anycostfl.fleet import choose, draw_cohort
from anycostfl.rounds import receive
from anycostfl.runs import Snapshot, Turn, Turns
from anycostfl.server import Server
from anycostfl.state import State
from anycostfl.types import RoundRecord
from anycostfl.workers import count_workers, one_thread, open_executor


def run(config: Config, *, workers: int = 1) -> Iterator[RoundRecord]:
    """Simulate an experiment, one record per round."""
    for turn in play(config, workers=workers):
        yield turn.record


def play(config: Config, *, workers: int = 1, start: Snapshot | None = None) -> Turns:
    """The training procedure of the paper; data and model are loaded at once, before any round."""
    server = Server(settle(config), start)
    if count_workers(workers) > 1:
        server.side.shared.in_shared_memory()
    return _play(server, workers, dict(start.memories) if start else {})


def _play(server: Server, workers: int, memories: dict[int, State]) -> Turns:
    """Round after round."""
    config, side = server.config, server.side
    profiles = profiles_of(config.fleet)
    everyone = range(config.fleet.devices)
    liars = attacks.liars(config.attack, config.fleet.devices, config.run.seed)

    with open_executor(side, workers) as executor:
        for number in range(server.first, config.run.rounds):
            with one_thread():
                server.begin(number)
                cohort = draw_cohort(
                    config.fleet,
                    seed=config.run.seed,
                    round_index=number,
                    samples=side.sample_counts(),
                    profiles=profiles,
                    ready=server.bench.free(everyone, number),
                )
                drawn = choose(config.fleet, everyone, seed=config.run.seed, round_index=number)
                planned = server.plan(number, cohort, drawn.tolist())

                with server.showing():
                    jobs = [a.job(memories, server.moved, liars) for a in planned.assignments]
                    replies = executor.perform(jobs)
                    outcomes = receive(server.method, planned.assignments, replies)
                outcomes = server.absorb(outcomes)
                memories |= {o.reply.device: o.reply.memory for o in outcomes if o.reply.memory}

                accuracy = server.accuracy(number, executor)
                downloads = server.downloads(cohort)
                record = server.close(planned, outcomes, accuracy, downloads=downloads)
            yield Turn(record, server.snapshot(number, memories))
