"""The kinds of arrays that codecs work on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Integers = NDArray[np.int32]
Symbols = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Whole = int | np.signedinteger[Any]  # a number of one of them
