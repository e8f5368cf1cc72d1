"""Faults on purpose, one file each: `python -m drills` (docs/reliability.md)."""
