"""The clock is set to one frequency on every core, and what was there comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anycostfl.machine.clock import restored_clock, set_clock, settable_clock

STEPS = "600000 750000 1000000 1500000"


def board(root: Path, cores: int = 2) -> Path:
    for core in range(cores):
        folder = root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        for name, kilohertz in (
            ("cpuinfo_min_freq", "600000"),
            ("cpuinfo_max_freq", "1500000"),
            ("scaling_min_freq", "600000"),
            ("scaling_max_freq", "1500000"),
            ("scaling_available_frequencies", STEPS),
        ):
            (folder / name).write_text(kilohertz + "\n")
    return root


def limits(root: Path) -> list[str]:
    files = sorted(root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_m*_freq"))
    return [file.read_text().strip() for file in files]


@pytest.mark.parametrize(
    ("hertz", "kilohertz"), [(6e8, "600000"), (8e8, "1000000"), (1.5e9, "1500000")]
)
def test_every_core_gets_the_next_step_and_its_own_limits_back(
    tmp_path: Path, hertz: float, kilohertz: str
) -> None:
    root = board(tmp_path)
    before = limits(root)
    with restored_clock(root):
        set_clock(hertz, root)
        assert limits(root) == 4 * [kilohertz]
        set_clock(1.5e9, root)
        assert limits(root) == 4 * ["1500000"]
    assert limits(root) == before


def test_the_range_is_known_where_it_can_be_set(tmp_path: Path) -> None:
    clock = settable_clock(board(tmp_path / "board"))
    assert clock is not None
    assert (clock.min_hz, clock.max_hz) == (6e8, 1.5e9)
    assert settable_clock(tmp_path / "none") is None


def test_a_process_that_is_told_to_end_restores_the_clock(tmp_path: Path) -> None:
    """As `join` does: SIGTERM becomes an exit."""
    root = board(tmp_path)
    before = limits(root)
    program = (
        "import signal, sys, time; from pathlib import Path\n"
        "from anycostfl.machine.clock import restored_clock, set_clock\n"
        f"root = Path({str(root)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "with restored_clock(root):\n"
        "    set_clock(7.5e8, root); print('set', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"set\n"
        assert limits(root) == 4 * ["750000"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 143
    assert limits(root) == before
