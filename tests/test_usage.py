"""What a stretch of work took: the kernel's own figures, recorded trees, None without a sensor."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from anycostfl.machine import usage
from anycostfl.machine.usage import (
    energy_meter,
    is_throttled,
    memory_bytes,
    reset_peak,
    start_usage,
)

MB = 1_000_000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_the_peak_is_that_of_the_stretch() -> None:
    """200 MB that are gone before the end are in its peak, and not in that of the next."""
    reset_peak()
    stop = start_usage()
    block = np.ones(200 * MB // 8)
    del block
    first = stop()
    second = start_usage()()
    assert first.peak_bytes is not None
    assert first.base_bytes is not None
    assert second.peak_bytes is not None
    assert 190 * MB < first.peak_bytes - first.base_bytes < 260 * MB
    assert second.peak_bytes < first.peak_bytes - 150 * MB
    assert memory_bytes()[0] is not None


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_nothing_is_measured_where_there_is_no_sensor(tmp_path: Path) -> None:
    found = start_usage(tree(tmp_path, {"proc/self/status": "Name:\tpython\n"}))()
    assert (found.joules, found.clock_hz, found.celsius, found.throttled) == (None,) * 4
    assert (found.base_bytes, found.peak_bytes) == (None, None)
    assert found.seconds >= 0


def test_joules_of_a_counter_clock_and_heat_are_read(tmp_path: Path) -> None:
    """RAPL counts 2.5 J meanwhile, a core is throttled once more, two cores have their clocks."""
    rapl = "sys/class/powercap/intel-rapl:0"
    heat = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
    files = {
        f"{rapl}/name": "package-0",
        f"{rapl}/energy_uj": "1000000",
        f"{rapl}/max_energy_range_uj": "262143328850",
        heat: "7",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "1300000",
        "sys/class/thermal/thermal_zone0/temp": "48000",
        "sys/class/thermal/thermal_zone1/temp": "61500",
        "proc/self/status": "VmHWM:\t    1000 kB\nVmRSS:\t     900 kB\n",
    }
    root = tree(tmp_path, files)
    stop = start_usage(root)
    time.sleep(0.01)
    tree(root, {f"{rapl}/energy_uj": "3500000", heat: "8"})
    found = stop()
    assert found.joules == pytest.approx(2.5, rel=0.05)
    assert found.clock_hz == pytest.approx(1.4e9)
    assert found.celsius == 61.5
    assert found.throttled is True
    assert (found.base_bytes, found.peak_bytes) == (900 * 1024, 1000 * 1024)


@pytest.mark.parametrize(("state", "now"), [("0x50000", False), ("50005", True), ("", None)])
def test_a_raspberry_pi_says_whether_it_is_throttled_now(
    tmp_path: Path, state: str, now: bool | None
) -> None:
    file = "sys/devices/platform/soc/soc:firmware/get_throttled"
    assert is_throttled(tree(tmp_path, {file: state})) is now


def test_the_meter_is_looked_for_once(tmp_path: Path) -> None:
    assert energy_meter(tmp_path) is energy_meter(tmp_path) is None
    assert usage.has_meter() is (energy_meter() is not None)
