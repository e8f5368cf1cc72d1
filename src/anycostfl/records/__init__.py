"""A run on disk: what happened in every round, and where to resume."""
