"""Profiles: what the kernel reports is read correctly, what was measured is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anycostfl import config, profile, run
from anycostfl.cli.profile import _warning
from anycostfl.machine import sensors as machine
from anycostfl.planning import cost, draw
from anycostfl.profile import Measurement
from anycostfl.profile.speed import SpeedFit, WidthTiming, elastic_model, fit_speed
from command_line import Call
from small_runs import small_config

TREES = Path(__file__).with_name("data") / "sysfs"


def grow(name: str, root: Path) -> Path:
    """Lay out a recorded tree: a line is `path = content`."""
    for line in (TREES / f"{name}.txt").read_text().splitlines():
        if not line.startswith("#"):
            path, _, content = line.partition(" = ")
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.replace("\\n", "\n").replace("\\0", "\0") + "\n")
    return root


def found_meter(root: Path) -> machine.Meter:
    meter, _ = machine.find_meter(root)
    assert meter is not None
    return meter


# --- clock and name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "name", "clock"),
    [
        ("intel-laptop", "i7-8650U", (4e8, 3.6e9, 3.412345e9, "cpufreq")),
        ("jetson-orin-nano", "Orin Nano", (1.152e8, 1.5104e9, 1.4976e9, "cpufreq")),
        ("big-little", "", (6.912e8, 2.4e9, 2.0544e9, "cpufreq")),
        ("laptop-battery", "5700U", (4.188377e9, 4.188377e9, 4.188377e9, "/proc/cpuinfo")),
    ],
)
def test_clock_and_name(
    tree: str, name: str, clock: tuple[float, float, float, str], tmp_path: Path
) -> None:
    root = grow(tree, tmp_path)
    assert name in machine.device_name(root)
    found = machine.read_clock(root)
    assert (found.min_hz, found.max_hz, found.now_hz, found.source) == pytest.approx(clock)


def test_an_unreported_clock_is_counted(tmp_path: Path) -> None:
    clock = machine.read_clock(grow("bare", tmp_path))
    assert clock.source.startswith("counted")
    assert 2e8 < clock.min_hz == clock.max_hz == clock.now_hz < 8e9


def test_a_gpus_clock(tmp_path: Path) -> None:
    clock = machine.read_gpu_clock(grow("jetson-orin-nano", tmp_path))
    assert clock == machine.Clock(3.06e8, 6.2475e8, 6.12e8, "devfreq 17000000.gpu")
    assert machine.read_gpu_clock(tmp_path / "nowhere") is None


# --- meters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "name", "watts"),
    [
        ("jetson-orin-nano", "INA3221 VDD_IN", 5.064),
        ("jetson-agx-orin", "INA3221 VDDQ_VDD2_1V8AO + VDD_CPU_CV + VDD_GPU_SOC", 6.65),
        ("jetson-nano", "INA3221 POM_5V_IN", 2.19),
        ("laptop-battery", "battery BAT1", 10.0),
    ],
)
def test_sensors_report_watts(tree: str, name: str, watts: float, tmp_path: Path) -> None:
    meter = found_meter(grow(tree, tmp_path))
    assert meter.name == name
    power = machine.measure_power(meter, lambda: time.sleep(0.05))
    assert power.watts == pytest.approx(watts, rel=0.05)


def test_a_sensor_is_sampled_while_work_runs(tmp_path: Path) -> None:
    meter = found_meter(grow("jetson-nano", tmp_path))
    rail = next(tmp_path.glob("sys/bus/i2c/drivers/ina3221x/*/*/in_power0_input"))

    def work() -> None:
        time.sleep(0.2)
        rail.write_text("4190\n")
        time.sleep(0.2)

    power = machine.measure_power(meter, work, windows=1)
    assert power.watts == pytest.approx(3.19, rel=0.2)


def test_rapl_adds_packages_and_survives_the_wrap(tmp_path: Path) -> None:
    root = grow("intel-laptop", tmp_path)
    meter = found_meter(root)
    assert meter.name == "RAPL package-0, package-1"  # before the battery; no cores, no platform
    mean_watts, start = meter.start(), time.perf_counter()
    zones = root / "sys/class/powercap"
    (zones / "intel-rapl:0/energy_uj").write_text("1671150\n")  # it was 328850 below its range
    (zones / "intel-rapl:1/energy_uj").write_text("8000000\n")
    time.sleep(0.1)
    watts, seconds = mean_watts(), time.perf_counter() - start
    assert watts * seconds == pytest.approx(2.0 + 3.0, rel=0.05)


@given(st.integers(0, 10**9), st.integers(0, 10**9 - 1))
def test_a_counter_that_wraps_once_loses_nothing(start: int, spent: int) -> None:
    full = 10**9 + 1  # the counter starts over at its range
    after = (start + spent) % full
    assert machine.joules_between([start], [after], [full]) == pytest.approx(spent * 1e-6)


def test_no_meter_says_why(tmp_path: Path) -> None:
    assert machine.find_meter(grow("bare", tmp_path / "bare")) == (
        None,
        ("no energy meter (RAPL, INA3221 or a battery)",),
    )
    _, (charging,) = machine.find_meter(grow("big-little", tmp_path / "phone"))
    assert "battery is charging; unplug it" in charging
    root = grow("intel-laptop", tmp_path / "laptop")
    (root / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()  # as unreadable as to a user
    meter, (locked,) = machine.find_meter(root)
    assert "run as root" in locked
    assert meter is not None
    assert meter.name == "battery BAT0"


FP32 = ("training.precision=fp32", "training.device=cpu")


def test_estimates_are_stated_with_their_uncertainty(tmp_path: Path) -> None:
    settings = config.load_preset("demo")
    found = machine.find_meter(grow("bare", tmp_path))
    power = profile.training_power(settings, elastic_model(settings), 4, *found)
    assert power.meter == ""
    assert "no energy meter" in power.source
    assert "within a factor of 2.5" in power.source
    assert machine.estimate_power("aarch64", 4, ()).watts == 4
    assert machine.estimate_power("x86_64", 4, ()).watts == 20


def busy_meter() -> Callable[[], float]:
    """10 W always, and 20 W more if this thread computes, on however busy a machine."""
    used = time.thread_time()
    return lambda: 10.0 + 20.0 * (time.thread_time() - used > 0.005)


def test_power_is_what_training_adds_to_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "WINDOW_S", 0.1)
    settings = config.load_preset("demo", FP32)
    net = elastic_model(settings)
    power = profile.training_power(settings, net, 1, machine.Meter("counter", busy_meter))
    assert (power.meter, power.watts) == ("counter", 20)
    assert "load minus idle" in power.source
    monkeypatch.setattr(profile, "WINDOW_S", 0.01)
    power = profile.training_power(settings, net, 1, machine.Meter("stuck", lambda: lambda: 7.0))
    assert power.meter == ""
    assert "stuck shows no difference" in power.source


def test_the_processors_meter_says_nothing_about_a_gpu() -> None:
    settings = config.load_preset("demo", ["training.precision=fp32", "training.device=cuda"])
    net = elastic_model(config.load_preset("demo"))
    for meter in (None, machine.Meter("RAPL package-0", lambda: lambda: 7.0)):
        power = profile.training_power(settings, net, 1, meter)
        assert power.meter == ""
        assert "the GPU has no meter" in power.source


# --- one speed for all widths ---------------------------------------------------------------------

timings = st.lists(
    st.builds(
        lambda alpha, ratio, slow: WidthTiming(alpha, ratio * alpha, slow * alpha * 1e-3),
        st.floats(0.05, 1.0),
        st.floats(0.9, 1.1),
        st.floats(0.5, 2.0),
    ),
    min_size=1,
    max_size=6,
)


@given(timings, st.floats(0.9, 1.1), st.integers(0, 500))
def test_no_other_speed_has_a_smaller_worst_error(
    found: list[WidthTiming], other: float, overhead: int
) -> None:
    def worst(speed: SpeedFit) -> float:
        ratios = [
            speed.seconds(1e6, share) / timing.seconds_per_sample
            for timing in found
            for share in (timing.alpha, timing.flops_ratio)
        ]
        return max(abs(ratio - 1) for ratio in ratios)

    speed = fit_speed(1e6, found)
    assert worst(speed) == pytest.approx(speed.worst_error, abs=1e-9)
    changed = replace(speed, flops_per_second=speed.flops_per_second * other)
    assert worst(changed) >= speed.worst_error - 1e-9
    assert worst(replace(changed, overhead=overhead / 1000)) >= speed.worst_error - 1e-9


def test_speed_and_overhead_by_hand() -> None:
    speed = fit_speed(1e6, [WidthTiming(1.0, 1.0, 1.1e-3), WidthTiming(0.25, 0.25, 3.5e-4)])
    assert speed.overhead == pytest.approx(0.1)
    assert speed.flops_per_second == pytest.approx(1e9)
    assert speed.worst_error == pytest.approx(0.0, abs=1e-9)
    small = fit_speed(
        1e6,
        [
            WidthTiming(1.0, 1.0, 3.5e-3),
            WidthTiming(0.5, 0.5, 3e-3),
            WidthTiming(0.25, 0.25, 2.75e-3),
        ],
    )
    assert small.overhead == pytest.approx(2.5, rel=1e-2)  # of a network that is mostly calls
    assert small.worst_error < 1e-3
    fast = fit_speed(1e6, [WidthTiming(1.0, 1.0, 1e-3), WidthTiming(0.25, 0.25, 2e-4)])
    assert fast.overhead == 0.0  # faster than proportional: there is no negative overhead
    assert fast.worst_error == pytest.approx(1 / 9)


# --- the profile ----------------------------------------------------------------------------------


def example() -> Measurement:
    settings = config.load_preset("fmnist-iid", ["training.precision=fp32"])
    return Measurement(
        name='Board "X"',
        config=settings,
        threads=2,
        clock=machine.Clock(1e9, 2e9, 1.5e9, "cpufreq"),
        timings=(WidthTiming(1.0, 1.0, 2e-3), WidthTiming(0.5, 0.468, 1e-3)),
        speed=SpeedFit(3e10, 0.05, 0.1),
        power=machine.Power(6.75, 0.2, "RAPL package-0"),
        size_bits=53_227_840,
    )


def test_profile_by_hand_and_back_from_its_file(tmp_path: Path) -> None:
    measured = example()
    found = profile.as_profile(measured)
    assert found.flops_per_cycle == 20.0
    assert found.energy_coefficient == pytest.approx(2e-27, abs=0)  # 6.75 W / (1.5 GHz)³
    assert measured.cycles_per_sample == 72384512 / 20
    assert found.guess == ("power_w",)
    path = tmp_path / "board.toml"
    path.write_text(profile.to_toml(found, measured))
    assert config.load_profile(str(path)) == found
    with path.open("a") as file:
        file.write("rate_bps = 12.5e6\n")
    assert config.load_profile(str(path)) == replace(found, rate_bps=12.5e6)
    estimated = replace(measured.power, meter="", problems=("no meter",))
    assert "energy_coefficient" in profile.as_profile(replace(measured, power=estimated)).guess


def test_a_rate_in_the_profile_replaces_the_channel() -> None:
    spec = config.load_preset("fmnist-iid").fleet
    plain = profile.as_profile(example())
    fast = replace(plain, rate_bps=12.5e6)
    place = {"distance_m": 300.0, "latency_s": 5.0, "energy_j": 3.0}
    assert draw.place_device(fast, spec, **place).rate_bps[0] == 12.5e6
    channel = draw.channel_rate_bps(spec, 300.0, 0.1, sharers=15)
    assert draw.place_device(plain, spec, **place).rate_bps[0] == pytest.approx(float(channel))
    mixed = replace(spec, profiles=("fast", "plain"), cohort=60)
    profiles = {"fast": fast, "plain": plain}
    cohort = draw.draw_cohort(mixed, seed=0, round_index=0, profiles=profiles)
    drawn = draw.draw_cohort(replace(spec, cohort=60), seed=0, round_index=0)
    assert np.all(cohort.devices.rate_bps[::2] == 12.5e6)
    assert np.array_equal(cohort.devices.rate_bps[1::2], drawn.devices.rate_bps[1::2])


def test_planner_and_simulator_predict_what_the_profile_says(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    measured = example()
    path.write_text(profile.to_toml(profile.as_profile(measured), measured))
    settings = small_config(
        tmp_path, f'fleet.profiles=["{path}"]', "fleet.latency_s=5", "fleet.energy_max_j=9",
        "run.rounds=1", "training.precision=fp32",
    )  # fmt: skip
    (record,) = run(settings)
    for device in record.devices:
        full = device.samples * 72384512 / 3e10 * 1.5e9 / device.frequency_hz
        assert device.compute_s == pytest.approx(full * (device.flops_ratio + 0.05))
    devices = draw.place_device(
        config.load_profile(str(path)), settings.fleet, distance_m=1.0, latency_s=5.0, energy_j=9.0
    )
    cycles = cost.sub_model_cycles(devices, settings.workload, 0.5)
    half = cost.compute_time_s(cycles, np.array([1.5e9]))
    assert half[0] == pytest.approx(0.55 * 20 * 72384512 / 3e10)


# --- the command ----------------------------------------------------------------------------------


def test_this_machine_is_measured_for_real(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("anycostfl.profile.speed.REPETITION_S", 0.02)
    words = ["--out", tmp_path / "me.toml", "--threads", "1", "--json", "--repeats", "1"]
    sets = [word for item in FP32 for word in ("--set", item)]
    threads = torch.get_num_threads()
    code, text, _ = call("profile", "demo", *words, *sets, "--name", "me")
    assert code == 0
    document = json.loads(text)
    found = config.load_profile(str(tmp_path / "me.toml"))
    assert found.name == document["profile"]["name"] == "me"
    assert found.rate_bps is None
    assert [w["alpha"] for w in document["measured"]["widths"]] == [1.0, 0.75, 0.5, 0.25]
    speed = document["measured"]["flops_per_second"]
    cycles = document["measured"]["clock"]["now_hz"]
    assert found.flops_per_cycle * cycles == pytest.approx(speed, rel=1e-4)
    assert 1e8 < speed < 1e13
    assert torch.get_num_threads() == threads


def test_a_doubtful_speed_is_warned_of() -> None:
    assert not _warning(SpeedFit(1e10, overhead=0.3, worst_error=0.1))
    assert "up to 40 % off" in _warning(SpeedFit(1e10, overhead=0.3, worst_error=0.4))
    assert "10000.0 % of W" in _warning(SpeedFit(1e10, overhead=100.0, worst_error=0.01))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "'--repeats': 0 is not in the range x>=1"),
        (["--threads", "-1"], "'--threads': -1 is not in the range x>=0"),
        (["--out", "me.json"], "must end in .toml"),
        (["no-such-preset"], "no preset 'no-such-preset'"),
    ],
)
def test_bad_input(call: Call, words: list[str], message: str) -> None:
    code, _, told = call("profile", *words)
    assert code == 2
    assert message in told
