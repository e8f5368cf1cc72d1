"""What a run reached and what it cost, in one small table."""

from __future__ import annotations

from collections.abc import Sequence

from anycostfl.records import refusals, totals
from anycostfl.types import RoundRecord


def summarise(
    method: str, target_accuracy: float, records: Sequence[RoundRecord]
) -> dict[str, object]:
    """Accuracy, cost, and the cost of the first round that reached the target."""
    accuracies = [r.accuracy for r in records if r.accuracy is not None]
    spent = totals(records)
    hit = next((i for i, r in enumerate(records) if (r.accuracy or 0) >= target_accuracy), None)
    reached = totals(records[: hit + 1]) if hit is not None else None
    benched = {d.device for r in records for d in r.devices if d.kind == "benched"}
    return {
        "method": method,
        "rounds": len(records),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "simulated_minutes": spent["latency_s"] / 60,
        "energy_kj": spent["energy_j"] / 1e3,
        "uploaded_mb": spent["bytes_up"] / 1e6,
        "downloaded_mb": spent["bytes_down"] / 1e6,
        "mean_alpha": spent["mean_alpha"],
        "mean_beta": spent["mean_beta"],
        "devices_sat_out": int(spent["sat_out"]),
        "devices_failed": int(spent["failed"]),
        "updates_refused": int(spent["refused"]),
        "refused_because": refusals(records),
        "updates_left_out": int(spent["left_out"]),
        "devices_benched": len(benched),
        "rounds_benched": int(spent["benched"]),
        "target_accuracy": target_accuracy,
        "rounds_to_target": None if hit is None else hit + 1,
        "minutes_to_target": reached and reached["latency_s"] / 60,
        "kj_to_target": reached and reached["energy_j"] / 1e3,
    }
