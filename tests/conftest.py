"""One thread per test process: the checks run two of them on two cores. Nothing is timed."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from anycostfl.cli import main
from command_line import Call

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_works() -> None:
    """Also where a shell started the checks in the background: it has children ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    monkeypatch.chdir(tmp_path)

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anycostfl", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, " ".join(told.err.split())

    return command


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
