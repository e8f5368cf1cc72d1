"""Run nncodec in its own environment (numpy < 2) on an update, for benchmarks/codec.py.

python nncodec_worker.py UPDATE.safetensors BYTES QP [QP …]   →   one JSON line per QP

The first one that takes more than BYTES is the last.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ABSENT = {"torchvision", "tensorflow", "pandas", "sklearn", "cv2", "wandb", "flwr", "PIL", "h5py"}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for packages that nncodec imports and coding does not use."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002 - the protocol's
    ) -> importlib.machinery.ModuleSpec | None:
        absent = fullname.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def main() -> None:
    """Encode and decode at every QP, printing bytes, error and CPU seconds."""
    sys.meta_path.insert(0, _Absent())
    import numpy as np  # noqa: PLC0415 - after the stand-ins
    from safetensors.numpy import load_file  # noqa: PLC0415

    with contextlib.redirect_stdout(io.StringIO()):
        from nncodec import nnc  # noqa: PLC0415
    update = load_file(sys.argv[1])
    energy = sum(float(np.square(v, dtype=np.float64).sum()) for v in update.values())
    most = int(sys.argv[2])
    for qp in map(int, sys.argv[3:]):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),  # it leaves a copy of what it encoded where it runs
        ):
            started = time.process_time()
            stream = nnc.compress(dict(update), qp=qp, return_bitstream=True, verbose=False)
            encoded = time.process_time()
            decoded = nnc.decompress(stream, verbose=False)
            done = time.process_time()
        pairs = [(v.astype(np.float64), np.asarray(decoded[n])) for n, v in update.items()]
        lost = sum(float(np.square(v - d).sum()) for v, d in pairs)
        other = sum(float(np.square(d, dtype=np.float64).sum()) for _, d in pairs)
        common = sum(float((v * d).sum()) for v, d in pairs)
        print(
            json.dumps(
                {
                    "qp": qp,
                    "bytes": len(stream),
                    "relative_error": lost / energy,
                    "cosine": common / (energy * other) ** 0.5 if other else 0.0,
                    "encode_s": encoded - started,
                    "decode_s": done - encoded,
                }
            ),
            flush=True,
        )
        if len(stream) > most:
            break


if __name__ == "__main__":
    main()
