"""Machine code where its cache can be written, and where it cannot."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numba

from anycostfl.compiled import compiled


def test_without_a_folder_for_it_code_is_compiled_anew() -> None:
    real: Any = numba.njit

    def refuse(**options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'f': no locator available")
        return real(**options)

    def plain(x: int) -> int:
        return 2 * x

    with patch.object(numba, "njit", side_effect=refuse) as asked:
        double = compiled(plain)
    assert asked.call_count == 2
    assert double(21) == 42
