"""No process outlives the one that started it, however that one ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LOOK_S = 0.5
PARENT = "ANYCOSTFL_PARENT"  # in the environment of a process: the number of the one that starts it


def end_with_parent(end: Callable[[], None], parent: int) -> None:
    """Call `end` when the parent is gone, at once if it is already.

    An orphan has another parent, even while the dead one is a zombie that still has its number.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        end()

    threading.Thread(target=watch, daemon=True).start()
