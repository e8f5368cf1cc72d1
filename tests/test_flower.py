"""Over Flower's messages: the simulator's result, bit for bit, and nothing else counts."""

from __future__ import annotations

import itertools
import json
import logging
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Error, Message, RecordDict
from torch import Tensor

from anycostfl import methods, models
from anycostfl.cli.serve import _check_policy
from anycostfl.codec import compress
from anycostfl.codec.dense import pack_dense
from anycostfl.config import Config
from anycostfl.device import Reply, threads
from anycostfl.errors import AnycostError, ConfigError
from anycostfl.experiment import build_experiment, load_data, resolve
from anycostfl.flower import fleet
from anycostfl.flower.fleet import NotEnoughDevicesError, RoundPolicy
from anycostfl.flower.messages import to_envelope, to_records
from anycostfl.flower.numbers import NotReadyError, claim_number, note_nodes
from anycostfl.flower.server import serve_rounds
from anycostfl.flower.strategy import AnycostStrategy
from anycostfl.loop import RoundResult
from anycostfl.planning.cost import make_devices
from anycostfl.records.round import RoundRecord, Status
from anycostfl.records.run import SavedRun, read_journal
from anycostfl.rounds import Offers, close_round, first_state, open_round
from anycostfl.runs import begin
from anycostfl.simulate import simulate
from anycostfl.wire import messages
from anycostfl.wire.envelope import Envelope, MessageError
from flower_grid import FIRST_NODE, LocalGrid, Tamper, honest
from small_runs import small_config

QUICK = RoundPolicy(deadline_s=30.0, wait_for=5, patience_s=30.0)
SHORT = replace(QUICK, deadline_s=2.0)


def config_of(folder: Path, *more: str) -> Config:
    five = ("fleet.devices=5", "fleet.cohort=5", "run.rounds=2")
    return resolve(small_config(folder, *five, *more))


def over_flower(
    config: Config, tamper: Tamper = honest, policy: RoundPolicy = QUICK
) -> list[RoundResult]:
    return list(serve_rounds(config, LocalGrid(config.fleet.devices, tamper), policy))


def saved(results: list[RoundResult]) -> SavedRun:
    """What is on disk after these rounds."""
    records = tuple(result.record for result in results)
    return SavedRun("", records, results[-1].state.checkpoint(), ())


def told(results: list[RoundResult], device: int) -> list[str]:
    """What became of a device in every round."""
    return [d.explained for r in results for d in r.record.devices if d.device == device]


def off_the_wire(record: RoundRecord) -> RoundRecord:
    """As the simulator writes it, which sends no messages."""
    devices = [
        replace(d, wire_bytes_up=0, wire_bytes_down=0, busy_s=0.0, measured=None)
        for d in record.devices
    ]
    return replace(record, devices=tuple(devices))


def assert_same(flower: list[RoundResult], simulated: list[RoundResult]) -> None:
    assert [off_the_wire(t.record) for t in flower] == [t.record for t in simulated]
    for one, other in zip(flower, simulated, strict=True):
        assert one.state.weights.keys() == other.state.weights.keys()
        for name, tensor in other.state.weights.items():
            assert torch.equal(one.state.weights[name], tensor), name


SOON = ("anycostfl", "stc", "heterofl")
METHODS = [
    name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in methods.names()
]


@pytest.mark.parametrize("method", METHODS)
def test_the_result_is_the_simulators_bit_for_bit(tmp_path: Path, method: str) -> None:
    config = config_of(tmp_path, f"run.method={method}", "run.rounds=3", "fleet.cohort=4")
    flower = over_flower(config)
    assert_same(flower, list(simulate(config)))
    assert len({d.alpha for t in flower for d in t.record.devices}) > 1 or method != "anycostfl"


def test_as_a_strategy_of_flower_it_is_the_same(tmp_path: Path) -> None:
    kept = ("compression.feedback=true", "aggregation.momentum=0.5")
    config = config_of(tmp_path, "run.rounds=3", "fleet.cohort=4", *kept)
    strategy = AnycostStrategy(config)
    with threads(1):
        result = strategy.start(LocalGrid(5), strategy.initial_arrays(), num_rounds=3)
    simulated = list(simulate(config))
    assert [off_the_wire(r) for r in strategy.records] == [t.record for t in simulated]
    state = result.arrays.to_torch_state_dict()
    for name, tensor in simulated[-1].state.weights.items():
        assert torch.equal(state[name], tensor), name
    assert result.train_metrics_clientapp[3]["accuracy"] == simulated[-1].record.metric


DOWN = ("compression.downlink=0.1", "run.rounds=4", "fleet.cohort=3")


@pytest.mark.parametrize("method", ["anycostfl+", "stc"])
def test_steps_to_the_public_model_give_the_simulators_result(tmp_path: Path, method: str) -> None:
    config = config_of(tmp_path, *DOWN, f"run.method={method}")
    flower = over_flower(config)
    assert_same(flower, list(simulate(config)))
    whole = 4 * sum(t.numel() for t in flower[0].state.public.values())
    down = [[d.bytes_down for d in result.record.devices] for result in flower]
    assert max(down[0]) < 4000  # everybody has the initial model
    assert max(map(max, down)) < whole / 2
    for result in flower:
        for d in result.record.devices:
            assert d.bytes_down <= d.wire_bytes_down < d.bytes_down + 16000


def test_a_strategy_takes_the_same_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, *DOWN)
    strategy = AnycostStrategy(config)
    with threads(1):
        strategy.start(LocalGrid(5), strategy.initial_arrays(), num_rounds=4)
    assert [off_the_wire(r) for r in strategy.records] == [t.record for t in simulate(config)]


def test_after_a_restart_devices_go_on_from_what_they_hold(tmp_path: Path) -> None:
    config = config_of(tmp_path, *DOWN)
    grid, simulated = LocalGrid(5), list(simulate(config))
    flower = list(serve_rounds(config, grid, QUICK))
    again = list(serve_rounds(config, grid, QUICK, saved(flower[:2])))  # from an older checkpoint
    for one, other in zip(again, simulated[2:], strict=True):
        assert all(torch.equal(t, other.state.weights[n]) for n, t in one.state.weights.items())
    whole = 4 * sum(t.numel() for t in flower[0].state.public.values())
    fresh = list(serve_rounds(config, LocalGrid(5), QUICK, saved(flower[:2])))  # they lost it
    assert {d.bytes_down for d in fresh[0].record.devices} == {whole}
    assert all(
        torch.equal(t, fresh[-1].state.weights[n]) for n, t in again[-1].state.weights.items()
    )


def test_a_device_that_forgot_its_public_model_says_so_and_catches_up(tmp_path: Path) -> None:
    config = config_of(tmp_path, "compression.downlink=0.1", "run.rounds=4")
    grid, seen = LocalGrid(5), []
    for result in serve_rounds(config, grid, QUICK):
        seen.append(result.record.devices)
        if result.record.round == 1:  # it is restarted, and back before the server looks
            grid.contexts[FIRST_NODE + 1].state = RecordDict()
    assert [devices[1].status is Status.OK for devices in seen] == [True, True, False, True]
    assert seen[2][1].explained.startswith("failed: this device holds another public model")
    assert seen[3][1].bytes_down > 2 * seen[3][0].bytes_down  # from the initial model on


def test_a_strategy_goes_on_without_those_who_fail(tmp_path: Path) -> None:
    def tamper(device: int, sent: Message, reply: Message) -> Message | None:
        if sent.metadata.message_type != "train":
            return None if device == 0 else reply  # it never says what it can afford
        return None if device == 1 else reply

    config = config_of(tmp_path, "run.rounds=1")
    strategy = AnycostStrategy(config)
    strategy.start(LocalGrid(5, tamper), strategy.initial_arrays(), num_rounds=1)
    (record,) = strategy.records
    assert {d.device: d.explained for d in record.devices} == {
        1: "missing: no reply in time", 2: "ok", 3: "ok", 4: "ok",
    }  # fmt: skip
    nobody = AnycostStrategy(config)
    nothing = nobody.start(LocalGrid(0), nobody.initial_arrays(), num_rounds=1)
    assert nothing.train_metrics_clientapp == {}
    assert nobody.records == [RoundRecord(0, None, ())]


def test_devices_go_on_from_what_they_hold_when_a_run_is_made_longer(tmp_path: Path) -> None:
    config = config_of(tmp_path, *DOWN, "run.method=anycostfl+")
    grid, fewer = LocalGrid(5), replace(config, run=replace(config.run, rounds=2))
    first = list(serve_rounds(fewer, grid, QUICK))
    rest = list(serve_rounds(config, grid, QUICK, saved(first)))
    for one, other in zip([*first, *rest], simulate(config), strict=True):
        assert all(torch.equal(t, other.state.weights[n]) for n, t in one.state.weights.items())


def test_going_on_from_any_round_ends_the_same(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=3")
    whole = over_flower(config)
    rest = list(serve_rounds(config, LocalGrid(5), QUICK, saved(whole[:1])))
    assert_same([whole[0], *rest], list(simulate(config)))


# --- what a device remembers ----------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["kernel", "lowrank"])
def test_memories_survive_between_messages_and_follow_the_channels(
    tmp_path: Path, codec: str
) -> None:
    few = ("run.rounds=4", "fleet.cohort=3", f"compression.codec={codec}")
    moving = ("aggregation.momentum=0.5", "aggregation.step=0.8")
    config = config_of(tmp_path, *few, *moving, "compression.feedback=true")
    simulated = list(simulate(config))
    assert simulated[-1].record != list(simulate(config_of(tmp_path, *few, *moving)))[-1].record
    grid = LocalGrid(5)
    flower = list(serve_rounds(config, grid, QUICK))
    assert_same(flower, simulated)
    again = list(serve_rounds(config, grid, QUICK, saved(flower[:-1])))  # the last round once more
    assert_same([*flower[:-1], *again], simulated)


def test_a_lost_reply_does_not_disturb_what_a_device_remembers(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=3", "fleet.cohort=5", "run.method=anycostfl+")

    def lose_the_first(device: int, sent: Message, reply: Message) -> Message | None:
        first = sent.metadata.group_id == "0" and "task" in sent.content
        return None if first and device == 4 else reply

    grid = LocalGrid(5, lose_the_first)
    list(serve_rounds(config, grid, replace(QUICK, deadline_s=3.0)))
    told: dict[int, list[Mapping[str, Tensor]]] = {}
    for _, message in grid.sent:
        if "task" in message.content:
            task = messages.read_task(to_envelope(message.content))
            told.setdefault(task.info.round, []).append(task.moved)
    assert sorted(told) == [0, 1, 2]
    for orders in told.values():  # all are told the same, heard or not
        assert orders[0]
        assert all(torch.equal(o[n], orders[0][n]) for o in orders for n in orders[0])


# --- what is sent ---------------------------------------------------------------------------------


def test_only_the_channels_of_the_submodel_go_down_the_wire(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")
    (result,) = over_flower(config)
    for d in result.record.devices:
        assert d.bytes_down <= d.wire_bytes_down < d.bytes_down + 8000
        assert d.bytes_up < d.wire_bytes_up < d.bytes_up + 4000
    sizes = [d.bytes_down for d in sorted(result.record.devices, key=lambda d: d.alpha)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_the_first_task_lives_until_the_deadline_however_long_handing_out_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anycostfl.flower.fleet.SLOWEST_BPS", 1e6)
    grid = LocalGrid(5)
    (result,) = serve_rounds(config_of(tmp_path, "run.rounds=1"), grid, QUICK)
    handing_out_s = 8 * sum(d.bytes_down for d in result.record.devices) / 1e6
    lives_s = {m.metadata.ttl for _, m in grid.sent if "task" in m.content}
    assert lives_s == {QUICK.deadline_s + fleet.SPARE_S + handing_out_s}


# --- what is refused ------------------------------------------------------------------------------

FULL_SHAPES: dict[str, torch.Size] = {}


def retold(reply: Message, change: Callable[[messages.Result], messages.Result]) -> Message:
    """The reply with another result."""
    result = change(messages.read_result(to_envelope(reply.content)))
    other = Message(to_records(result.pack()), reply_to=Message(RecordDict(), 1, "train"))
    other.metadata.__dict__.update(reply.metadata.__dict__)
    return other


def attack(how: Callable[[Message, messages.Result], messages.Result], attacker: int) -> Tamper:
    def tamper(device: int, sent: Message, reply: Message) -> Message:
        if device != attacker or "result" not in reply.content:
            return reply
        return retold(reply, lambda result: how(sent, result))

    return tamper


def garbage(_sent: Message, result: messages.Result) -> messages.Result:
    return replace(result, payload=bytes(range(256)) * 4)


def nothing(_sent: Message, result: messages.Result) -> messages.Result:
    return replace(result, payload=b"")


def other_plan(sent: Message, result: messages.Result) -> messages.Result:
    """An update of the full model, however narrow the device's own was."""
    task = messages.read_task(to_envelope(sent.content))
    update = {name: torch.ones(shape) for name, shape in FULL_SHAPES.items()}
    payload = compress(update, 0.05, seed=1, binding=task.upload.binding)
    return replace(result, payload=payload)


def not_a_number(sent: Message, result: messages.Result) -> messages.Result:
    """A dense payload that is whole, bound to the plan, and holds one NaN."""
    task = messages.read_task(to_envelope(sent.content))
    shapes = {name: FULL_SHAPES[name] for name in FULL_SHAPES}
    payload = bytearray(
        pack_dense({n: torch.ones(s) for n, s in shapes.items()}, binding=task.upload.binding)
    )
    payload[38:42] = struct.pack("<f", math.nan)
    payload[-4:] = struct.pack("<I", zlib.crc32(payload[:-4]))
    return replace(result, payload=bytes(payload))


@pytest.mark.parametrize(
    ("method", "how", "why"),
    [
        ("anycostfl", garbage, "refused: "),
        ("anycostfl", nothing, "refused: "),
        ("anycostfl", other_plan, "refused: "),
        ("fedavg", garbage, "refused: malformed: a dense payload of this plan has"),
        (
            "fedavg",
            not_a_number,
            "refused: malformed: the payload has a value that is not finite",
        ),
    ],
)
def test_a_lying_device_is_refused_and_the_round_goes_on(
    tmp_path: Path,
    method: str,
    how: Callable[[Message, messages.Result], messages.Result],
    why: str,
) -> None:
    config = config_of(tmp_path, f"run.method={method}", "fleet.energy_max_j=0.01")
    module = build_experiment(config, load_data(config)).net.module
    FULL_SHAPES.update({n: t.shape for n, t in module.named_parameters()})
    first, second = over_flower(config, attack(how, attacker=4))
    assert first.record.devices[4].alpha < 1 or method == "fedavg"
    for result in (first, second):  # it is asked again, and refused again
        statuses = {d.device: d.explained for d in result.record.devices}
        assert statuses.pop(4).startswith(why)
        assert set(statuses.values()) == {"ok"}
        assert all(torch.isfinite(t).all() for t in result.state.weights.values())


def test_the_payload_of_another_round_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    kept: list[bytes] = []

    def stale(_sent: Message, result: messages.Result) -> messages.Result:
        kept.append(result.payload)
        return replace(result, payload=kept[0])

    first, second = over_flower(config, attack(stale, attacker=3))
    assert first.record.devices[3].status is Status.OK
    assert second.record.devices[3].cause == "foreign"


def test_a_reply_that_is_no_result_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def tamper(device: int, _sent: Message, reply: Message) -> Message:
        if device == 2 and "result" in reply.content:
            del reply.content["payload"]
            reply.content["model"] = ArrayRecord()
        return reply

    results = over_flower(config, tamper)
    assert [t.record.devices[2].explained for t in results] == [
        "refused: unreadable: a message without anycostfl/payload"
    ] * 2


def test_impossible_capabilities_keep_nodes_out(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")

    def tamper(device: int, _sent: Message, reply: Message) -> Message:
        if reply.has_error():  # the answer to a refusal
            return reply
        table = reply.content.config_records["capabilities"]
        if device == 1:
            table["rate_bps"] = math.nan
        elif device == 2:
            table["samples"] = -20.0
        elif device == 3:
            del table["energy_j"]
        return reply

    (result,) = over_flower(config, tamper, replace(QUICK, wait_for=2))
    assert [d.device for d in result.record.devices] == [0, 4]


MEANS = {
    "samples": 80.0, "flops_per_cycle": 4.0, "energy_coefficient": 1e-27, "frequency_min_hz": 1e8,
    "frequency_max_hz": 2e9, "rate_bps": 1e7, "power_w": 0.1, "latency_s": 0.15, "energy_j": 0.03,
    "overhead": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", 1e19), ("samples", 0.5), ("energy_coefficient", 1e-300), ("energy_j", 1e300),
     ("overhead", -1.0), ("overhead", 1e200), ("distance_m", -1.0), ("rate_bps", math.inf)],
)  # fmt: skip
def test_numbers_that_no_device_has_are_refused(name: str, value: float) -> None:
    known = messages.Capabilities(0, 0, 10.0, make_devices(**MEANS))
    table = dict(known.pack().tables["capabilities"])
    rest = known.pack().tables["protocol"]
    read = messages.read_capabilities(known.pack())
    assert (read.device, read.resources) == (0, known.resources)
    with pytest.raises(MessageError, match=f"{name}: given .*, must be a number in"):
        messages.read_capabilities(
            Envelope({"capabilities": {**table, name: value}, "protocol": rest})
        )


def test_all_possible_capabilities_can_be_planned_with_and_journalled(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    experiment = build_experiment(config, load_data(config))
    state, writer = first_state(experiment), begin(tmp_path / "run", config)
    for number, (name, end) in enumerate(itertools.product(MEANS, ("low", "high"))):
        extreme = {name: getattr(messages.QUANTITIES.get(name, messages.QUANTITY), end)}
        if name.startswith("frequency"):
            extreme = {"frequency_min_hz": extreme[name], "frequency_max_hz": extreme[name]}
        found = [
            messages.Capabilities(device, 0, 0.0, make_devices(**{**MEANS, **row}))
            for device, row in enumerate(({}, extreme))
        ]
        opened, plan = open_round(experiment, state, Offers(fleet.cohort_of(found), [0, 1]))
        replies = [Reply(a.device, missing="late") for a in plan.assignments]
        _, record = close_round(experiment, opened, plan, replies)
        writer.append(replace(record, round=number))
    assert read_journal(tmp_path / "run")[1] == ()


# --- who does not answer --------------------------------------------------------------------------


def test_a_missing_reply_ends_the_round_at_its_deadline_and_the_device_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "run.rounds=4")
    forgotten: list[int] = []
    drop = "anycostfl.flower.fleet.drop_messages"
    monkeypatch.setattr(drop, lambda _grid, ids: forgotten.append(len(list(ids))))

    def tamper(device: int, sent: Message, reply: Message) -> Message | None:
        lost = device == 4 and sent.metadata.group_id == "0" and "task" in sent.content
        return None if lost else reply

    results = serve_rounds(config, LocalGrid(5, tamper), SHORT)
    *others, missing = next(results).record.devices
    assert missing.explained == "missing: no reply within 2 s"
    assert (missing.bytes_up, missing.wire_bytes_up) == (0, 0)
    assert missing.wire_bytes_down > 0
    assert {d.status for d in others} == {"ok"}
    time.sleep(fleet.REFRESH_S)  # by then the server asks it again
    *_, last = results
    assert [d.status for d in last.record.devices] == ["ok"] * 5
    assert forgotten == [1, 0, 0, 0]  # a task without a reply need not be kept


def test_a_task_that_is_not_taken_does_not_end_the_round_early(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")
    grid = LocalGrid(5)
    push, pull = grid.push_messages, grid.pull_messages
    ready: dict[str, float] = {}  # when the reply of the slow device is there

    def push_all_but_one(messages: Iterable[Message]) -> Iterable[str]:
        return [push_one(message) for message in messages]

    def push_one(letter: Message) -> str:
        if "task" in letter.content and letter.metadata.dst_node_id == FIRST_NODE + 1:
            grid.online.discard(FIRST_NODE + 1)  # its key was just removed
            return ""
        (name,) = push([letter])
        if "task" in letter.content and letter.metadata.dst_node_id == FIRST_NODE + 4:
            ready[name] = time.monotonic() + 3 * fleet.REFRESH_S
        return name

    def pull_what_is_ready(message_ids: Iterable[str]) -> Iterable[Message]:
        return pull([name for name in message_ids if ready.get(name, 0.0) < time.monotonic()])

    grid.push_messages = push_all_but_one  # type: ignore[method-assign]
    grid.pull_messages = pull_what_is_ready  # type: ignore[method-assign]
    (result,) = serve_rounds(config, grid, QUICK)
    assert [d.explained for d in result.record.devices] == [
        "ok", "missing: Flower did not take the task", "ok", "ok", "ok",
    ]  # fmt: skip
    assert result.record.devices[1].wire_bytes_down == 0


def test_an_exception_on_a_device_is_its_own_failure(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")
    codes = {1: 2, 2: 5}  # the app raised, the node is unavailable

    def tamper(device: int, sent: Message, reply: Message) -> Message:
        if device not in codes or "task" not in sent.content:
            return reply
        error = Message(Error(codes[device], "out of memory"), reply_to=sent)
        error.metadata.__dict__["_src_node_id"] = FIRST_NODE + device
        return error

    (result,) = over_flower(config, tamper)
    assert [d.explained for d in result.record.devices] == [
        "ok", "failed: out of memory", "missing: out of memory", "ok", "ok",
    ]  # fmt: skip


def test_an_attack_that_would_not_take_place_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, "attack.kind=scale")
    with pytest.raises(ConfigError, match="only simulated devices attack"):
        next(serve_rounds(config, LocalGrid(5), QUICK))
    with pytest.raises(ConfigError, match="only simulated devices attack"):
        AnycostStrategy(config)


def test_who_sits_out_is_named_with_the_budgets_that_would_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    poor = ("fleet.energy_min_j=1e-9", "fleet.energy_max_j=1e-9", "run.rounds=1")
    config = small_config(tmp_path, *poor, "fleet.devices=5", "fleet.cohort=5")
    logging.getLogger("flwr").addHandler(caplog.handler)
    list(serve_rounds(config, LocalGrid(5), QUICK))
    told = {r.getMessage() for r in caplog.records if "sits out" in r.getMessage()}
    assert len(told) == 5
    assert all(" (radio); it needs " in line for line in told)


def test_how_long_each_device_worked_is_kept_and_who_is_slow_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)

    def slow(_sent: Message, result: messages.Result) -> messages.Result:
        return replace(result, busy_s=1000.0)

    logging.getLogger("flwr").addHandler(caplog.handler)
    results = over_flower(config, attack(slow, attacker=3))
    assert [r.record.devices[3].busy_s for r in results] == [1000.0] * 2
    assert all(d.busy_s > 0 for r in results for d in r.record.devices)
    named = [r for r in caplog.records if "device 3 worked 1000.00 s where" in r.getMessage()]
    assert len({id(record) for record in named}) == 1


def test_a_device_that_leaves_does_not_hold_up_the_round(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=4")
    grid = LocalGrid(5)

    def tamper(device: int, sent: Message, reply: Message) -> Message | None:
        if device == 3 and sent.metadata.group_id == "0" and "task" in sent.content:
            grid.online.discard(FIRST_NODE + 3)
            return None
        return reply

    grid.tamper = tamper
    results = serve_rounds(config, grid, replace(QUICK, deadline_s=300.0))
    assert next(results).record.devices[3].explained == "missing: the device is gone"
    assert [d.device for d in next(results).record.devices] == [0, 1, 2, 4]
    grid.online.add(FIRST_NODE + 3)
    time.sleep(fleet.REFRESH_S)  # by then the server looks again
    *_, last = results
    assert [d.device for d in last.record.devices] == [0, 1, 2, 3, 4]


def test_too_few_replies_change_nothing_and_are_recorded(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")

    def tamper(device: int, sent: Message, reply: Message) -> Message | None:
        return None if device > 1 and "task" in sent.content else reply

    (result,) = over_flower(config, tamper, replace(SHORT, min_replies=3))
    statuses = [d.explained for d in result.record.devices]
    assert statuses[:2] == ["unused: 2 usable replies, at least 3 needed"] * 2
    (nobody,) = over_flower(config, lambda _d, s, r: None if "task" in s.content else r, SHORT)
    for name, tensor in nobody.state.weights.items():
        assert torch.equal(result.state.weights[name], tensor)


def test_a_fleet_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(NotEnoughDevicesError, match="0 devices are ready"):
        list(serve_rounds(config, LocalGrid(0), RoundPolicy(wait_for=1, patience_s=0.5)))


def test_whoever_is_here_and_cannot_take_part_is_not_asked_to_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, "fleet.devices=2", "fleet.cohort=2")
    told = r"2 devices are ready.*1 more are here but cannot: .*2"
    with pytest.raises(NotEnoughDevicesError, match=told):
        list(serve_rounds(config, LocalGrid(3), RoundPolicy(wait_for=3, patience_s=5)))


def test_two_nodes_cannot_be_one_device(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")
    grid = LocalGrid(5)
    grid.contexts[FIRST_NODE + 4].node_config["partition-id"] = 0
    (result,) = serve_rounds(config, grid, replace(QUICK, wait_for=4))
    assert [d.device for d in result.record.devices] == [0, 1, 2, 3]
    assert {d.status for d in result.record.devices} == {"ok"}


@pytest.mark.parametrize("gone_s", [60.0, 0.0])
def test_a_device_that_crashed_is_let_in_as_another_node_when_the_old_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone_s: float
) -> None:
    monkeypatch.setattr("anycostfl.flower.fleet.GONE_S", gone_s)
    config = config_of(tmp_path, "run.rounds=3")
    grid, old, new = LocalGrid(5), FIRST_NODE, FIRST_NODE + 4
    grid.contexts[new].node_config["partition-id"] = 0
    grid.online.discard(new)
    comes_back, seen = gone_s > 0, []
    policy = replace(QUICK, wait_for=4, min_replies=4 if comes_back else 1)
    for result in serve_rounds(config, grid, policy):
        seen.append([d.device for d in result.record.devices])
        time.sleep(1.1 * fleet.REFRESH_S)  # by then the server looks again
        grid.online.add(new)
        if result.record.round == 1:
            grid.online.discard(old)
    assert seen == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3] if comes_back else [1, 2, 3]]
    assert any("rejection" in m.content for _, m in grid.sent) is not comes_back


def test_a_key_keeps_its_number_for_the_life_of_a_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1")
    (tmp_path / "flower").mkdir()
    nodes = {f"key-{i}": FIRST_NODE + i for i in range(5)}
    note_nodes(tmp_path, nodes)

    def taking_part(grid: LocalGrid, policy: RoundPolicy) -> list[int]:
        (result,) = serve_rounds(config, grid, policy, folder=tmp_path)
        return [d.device for d in result.record.devices]

    assert taking_part(LocalGrid(5), QUICK) == [0, 1, 2, 3, 4]
    assert json.loads((tmp_path / "devices.json").read_text()) == {f"key-{i}": i for i in range(5)}

    moved = {name: node + 100 for name, node in nodes.items()}  # the server was restarted
    note_nodes(tmp_path, moved)
    grid = LocalGrid(5)
    grid.contexts = {node + 100: context for node, context in grid.contexts.items()}
    for node, context in grid.contexts.items():
        context.node_id = node
    grid.contexts[moved["key-4"]].node_config["partition-id"] = 2  # whose device is away
    grid.online = {moved["key-0"], moved["key-1"], moved["key-4"]}
    assert taking_part(grid, replace(QUICK, wait_for=2)) == [0, 1]
    sent = [m.content for d, m in grid.sent if "rejection" in m.content and d == 2]
    with pytest.raises(
        messages.DeviceRejectedError, match="key key-4 is device 4 in this run, not 2"
    ):
        messages.read_info(to_envelope(sent[0]))


def test_a_number_has_one_key_and_a_node_without_a_key_none(tmp_path: Path) -> None:
    (tmp_path / "flower").mkdir()
    claim_number(tmp_path, 7, 0)  # no keys, nothing bound
    note_nodes(tmp_path, {"pi": 7, "nano": 8})
    claim_number(tmp_path, 7, 0)
    claim_number(tmp_path, 7, 0)
    with pytest.raises(
        messages.DeviceRejectedError, match="device 0 is key pi in this run, not nano"
    ):
        claim_number(tmp_path, 8, 0)
    with pytest.raises(NotReadyError):
        claim_number(tmp_path, 9, 1)
    (tmp_path / "devices.json").write_text("[")
    with pytest.raises(AnycostError, match="is damaged"):
        claim_number(tmp_path, 7, 0)


# --- refused often --------------------------------------------------------------------------------


def test_a_second_reply_is_refused_and_the_first_stands(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    grid = LocalGrid(5)
    pull, twice = grid.pull_messages, FIRST_NODE + 2

    def pull_twice(message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in pull(message_ids):
            if reply.metadata.src_node_id == twice and "result" in reply.content:
                again = retold(reply, lambda result: replace(result, payload=b"another"))
                yield from (reply, again)
            else:
                time.sleep(0.3)  # so that the round is not over before the second one is read
                yield reply

    grid.pull_messages = pull_twice  # type: ignore[method-assign]
    results = list(serve_rounds(config, grid, QUICK))
    plain = list(simulate(config))
    assert [d.status for d in results[0].record.devices] == ["ok"] * 5
    for name, tensor in plain[-1].state.weights.items():
        assert torch.equal(results[-1].state.weights[name], tensor), name
    assert [t.record.devices[2].duplicates for t in results] == [1, 1]


def test_a_device_refused_again_and_again_is_suspended_as_in_the_simulator(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=5", "gate.strikes=2", "gate.suspend_rounds=2")
    results = over_flower(config, attack(garbage, attacker=4))
    seen = told(results, 4)
    assert [text.partition(":")[0] for text in seen] == [
        "refused", "refused", "suspended", "suspended", "refused",
    ]  # fmt: skip
    assert seen[2] == "suspended: until round 4"
    rest = list(
        serve_rounds(config, LocalGrid(5, attack(garbage, attacker=4)), QUICK, saved(results[:3]))
    )
    assert [off_the_wire(t.record) for t in rest] == [off_the_wire(t.record) for t in results[3:]]


def test_a_fleet_of_suspended_devices_is_not_enough(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gate.strikes=1")
    attackers = attack(garbage, attacker=4)

    def tamper(_device: int, sent: Message, reply: Message) -> Message | None:
        return attackers(4, sent, reply)

    with pytest.raises(NotEnoughDevicesError, match="5 of them suspended"):
        over_flower(config, tamper, replace(QUICK, patience_s=2.0))
    assert device_statuses(config, tamper) == {"refused"}


def device_statuses(config: Config, tamper: Tamper) -> set[str]:
    grid = LocalGrid(config.fleet.devices, tamper)
    first = next(serve_rounds(config, grid, QUICK))
    return {d.status.partition(":")[0] for d in first.record.devices}


# --- who evaluates --------------------------------------------------------------------------------


def test_devices_evaluate_where_the_server_has_no_data(tmp_path: Path) -> None:
    """Their parts of the test set make up the whole, so the metric is the server's."""
    config = config_of(tmp_path)
    here = over_flower(config)
    there = over_flower(replace(config, data=replace(config.data, evaluate="devices")))
    assert [r.record.metric for r in there] == [r.record.metric for r in here]
    for name, tensor in here[-1].state.weights.items():
        assert torch.equal(there[-1].state.weights[name], tensor), name


@pytest.mark.parametrize(
    ("sums", "honest"),
    [
        ([1e6, 12.0], {0}),
        ([-3.0, 12.0], {0}),
        ([7.0, 0.0], {0}),
        ([7.0], {0}),
        ([math.nan, 12.0], {0}),
        ([], {0}),
        ([7.0, 12.0, 3.0], {0, 1, 2, 3}),  # of most devices, nobody knows better
    ],
    ids=str,
)
def test_impossible_evaluations_do_not_count(
    tmp_path: Path, sums: list[float], honest: set[int]
) -> None:
    config = config_of(tmp_path, "run.rounds=1", "data.evaluate=devices")
    known = torch.zeros(2).double()

    def tamper(device: int, _sent: Message, reply: Message) -> Message:
        if reply.has_error() or "evaluation" not in reply.content:
            return reply
        (vector,) = messages.read_evaluation(to_envelope(reply.content)).sums
        if device in honest:
            known.add_(vector)
            return reply
        vectors = (torch.tensor(sums, dtype=torch.float64),) if sums else ()
        reply.content.update(to_records(messages.Evaluation(12, vectors).pack()))
        return reply

    (result,) = over_flower(config, tamper)
    correct, count = known.tolist()
    assert count == 12 * len(honest)
    assert result.record.metric == correct / count


def test_evaluations_that_cancel_each_other_are_no_metric(tmp_path: Path) -> None:
    config = config_of(tmp_path, "run.rounds=1", "data.evaluate=devices")

    def tamper(device: int, _sent: Message, reply: Message) -> Message:
        if not reply.has_error() and "evaluation" in reply.content:
            lie = torch.tensor([-6.0, -48.0] if device == 4 else [1.0, 12.0]).double()
            reply.content.update(to_records(messages.Evaluation(12, (lie,)).pack()))
        return reply

    (result,) = over_flower(config, tamper)
    assert (result.record.metric, result.record.others) == (None, {})
    assert [d.status for d in result.record.devices] == ["ok"] * 5


# --- what samples are prepared by -----------------------------------------------------------------


def test_what_devices_told_of_their_samples_is_kept_with_the_run(tmp_path: Path) -> None:
    """The server has no data; a resumed run prepares as before, whoever is there now."""
    config = config_of(tmp_path, "run.rounds=3", "data.evaluate=devices")
    whole = list(serve_rounds(config, LocalGrid(5), QUICK))
    here = load_data(config).fitted
    fitted = whole[0].state.fitted
    assert fitted.keys() == here.keys() == {"mean", "std"}
    assert all(torch.allclose(fitted[name], tensor) for name, tensor in here.items())
    grid = LocalGrid(5)
    grid.online.discard(FIRST_NODE)
    four = replace(QUICK, wait_for=4)
    rest = list(serve_rounds(config, grid, four, saved(whole[:1])))
    assert [d.device for d in rest[-1].record.devices] == [1, 2, 3, 4]
    assert all(torch.equal(rest[-1].state.fitted[name], t) for name, t in fitted.items())
    told = [m for _, m in grid.sent if "experiment" in m.content]
    packed = {messages.read_info(to_envelope(m.content)).experiment.fitted for m in told}
    assert packed == {messages.pack_fitted(fitted)}


@pytest.mark.parametrize(
    "sums",
    [
        {"noise": torch.ones(3)},
        {"count": torch.zeros(1), "sum": torch.ones(1), "squares": torch.ones(1)},
        {"count": torch.ones(2), "sum": torch.ones(2), "squares": torch.ones(2)},
    ],
    ids=("foreign", "of nothing", "of other channels"),
)
def test_sums_of_no_samples_of_this_task_shift_nothing(
    tmp_path: Path, sums: dict[str, Tensor]
) -> None:
    config = config_of(tmp_path, "run.rounds=1", "data.evaluate=devices", "fleet.cohort=4")
    lie = {name: tensor.double() for name, tensor in sums.items()}

    def tamper(device: int, _sent: Message, reply: Message) -> Message:
        is_answer = not reply.has_error() and "capabilities" in reply.content
        if device == 0 and is_answer and "result" not in reply.content:
            found = messages.read_capabilities(to_envelope(reply.content))
            reply.content.update(to_records(replace(found, sums=lie).pack()))
        return reply

    (result,) = over_flower(config, tamper)
    others = LocalGrid(5)
    others.online.discard(FIRST_NODE)
    (without,) = serve_rounds(config, others, replace(QUICK, wait_for=4))
    assert result.record.metric is not None
    for name, tensor in without.state.fitted.items():
        assert torch.equal(result.state.fitted[name], tensor)


TOKENS = """
import torch
from torch import nn
from anycostfl.models import ModelSpec


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 64), nn.Linear(64, 7)

    def forward(self, tokens):
        return self.out(self.embedding(tokens).mean(1))


MODEL = ModelSpec(build=Words, example=lambda batch: torch.randint(7, (batch, 5)), summary="own")
"""


@pytest.mark.parametrize("evaluate", ["server", "devices"])
def test_samples_that_need_no_preparation_train_as_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: str
) -> None:
    """Whole numbers have nothing that could be fitted on them."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "words.py").write_text(TOKENS)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path / "models")])
    random = np.random.default_rng(0)
    tokens = random.integers(0, 7, (300, 5))
    arrays = {"inputs": tokens, "targets": tokens.max(1)}
    parts = {"train": slice(0, 240), "test": slice(240, 300)}
    every = {f"{p}_{k}": v[part] for p, part in parts.items() for k, v in arrays.items()}
    np.savez(tmp_path / "tokens.npz", **every)
    own = (f'data.name="{tmp_path / "tokens.npz"}"', "model.name=words", "limits.beta_max=1")
    config = config_of(tmp_path, *own, f"data.evaluate={evaluate}")
    assert_same(over_flower(config), list(simulate(config)))


def test_questions_go_out_in_one_request_and_late_answers_count(tmp_path: Path) -> None:
    """A question is repeated while its answer is on its way; whichever comes first is taken."""
    held: list[Message] = []

    def slow(_device: int, sent: Message, reply: Message) -> Message | None:
        if sent.metadata.message_type == "query":
            held.append(reply)
            return None
        return reply

    grid = LocalGrid(5, slow)
    pushes: list[int] = []
    push = grid.push_messages

    def counted(messages: Iterable[Message]) -> Iterable[str]:
        known = list(messages)
        pushes.append(len(known))
        return push(known)

    grid.push_messages = counted  # type: ignore[method-assign]
    config = config_of(tmp_path)
    experiment = build_experiment(config, load_data(config))
    there = fleet.FlowerFleet(grid, experiment, QUICK, start=first_state(experiment))
    there._wait(lambda: len(held) == 5, time.monotonic() + 10)
    assert pushes == [5]
    there._question(sorted(grid.online))
    assert [known.asked for known in there._nodes.values()] == [2] * 5
    first = next(iter(there._questions))
    there._handle(first, held[0])  # the answer to the first question, after the second was asked
    assert list(there.devices()) == [0]
    assert first not in there._questions


def held_back(tmp_path: Path, policy: RoundPolicy, rounds: int) -> list[RoundResult]:
    """Five devices, of which the last answers its first task only during the second round."""
    config = config_of(tmp_path, f"run.rounds={rounds}")
    grid = LocalGrid(5)
    pull = grid.pull_messages

    def pull_later(ids: Iterable[str]) -> Iterable[Message]:
        over = any(m.metadata.group_id == "1" and "task" in m.content for _, m in grid.sent)
        return pull([name for name in ids if over or not is_late(name)])

    def is_late(name: str) -> bool:
        device, message = grid.sent[int(name.removeprefix("message-"))]
        return device == 4 and message.metadata.group_id == "0" and "task" in message.content

    grid.pull_messages = pull_later  # type: ignore[method-assign,assignment]
    return list(serve_rounds(config, grid, policy))


def test_a_round_may_close_early_and_late_replies_are_recorded(tmp_path: Path) -> None:
    begin = time.monotonic()
    results = held_back(tmp_path, replace(QUICK, close_after=4), 3)
    assert time.monotonic() - begin < QUICK.deadline_s  # which it would have waited for
    first = results[0].record.devices
    assert [d.explained for d in first] == ["ok"] * 4 + [
        "missing: closed: the round was closed without it"
    ]
    assert results[0].state.suspensions.drawn_last(1) == set()
    later = [
        d.explained for r in results[1:] for d in r.record.devices if d.status is Status.UNUSED
    ]
    assert later == ["unused: late: its reply to round 1 came after that was closed"]


def test_a_round_closes_early_only_with_the_replies_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--close-after: given 1, must be 0 \(all\) or 2"):
        _check_policy(config_of(tmp_path), {}, 0, 2, 1)
    _check_policy(config_of(tmp_path), {}, 0, 2, 5)
