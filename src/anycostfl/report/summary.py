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
    benched = {d.device for r in records for d in r.devices if d.status.startswith("benched")}
    target = f"{100 * target_accuracy:g}_%"
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
        "devices_benched": len(benched),
        "rounds_benched": int(spent["benched"]),
        f"rounds_to_{target}": None if hit is None else hit + 1,
        f"minutes_to_{target}": reached and reached["latency_s"] / 60,
        f"kj_to_{target}": reached and reached["energy_j"] / 1e3,
    }
