"""`anycostfl` on a version of Flower that offers only what it documents.

python tests/documented.py join …
"""

from __future__ import annotations

from anycostfl.cli import main
from anycostfl.flower import _internal

if __name__ == "__main__":
    setattr(_internal, "NEEDS", dict.fromkeys(_internal.NEEDS, ("flwr.moved_elsewhere",)))  # noqa: B010
    main()
