"""Accuracy and cost of a run, as one flat table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anycostfl.records import bill_of, refusals, rounds_to
from anycostfl.types import RoundRecord


def summarise(
    method: str, target_accuracy: float, records: Sequence[RoundRecord]
) -> dict[str, object]:
    """Accuracy, cost, and the cost up to the first round that reached the target."""
    accuracies = [r.accuracy for r in records if r.accuracy is not None]
    devices = [device for record in records for device in record.devices]
    sent = [d for d in devices if d.bytes_up]
    kinds, refused = Counter(d.kind for d in devices), refusals(records)
    rounds = rounds_to(target_accuracy, records)
    bill, there = bill_of(records), None if rounds is None else bill_of(records[:rounds])
    return {
        "method": method,
        "rounds": len(records),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "simulated_minutes": bill.latency_s / 60,
        "energy_kj": bill.energy_j / 1e3,
        "uploaded_mb": bill.bytes_up / 1e6,
        "downloaded_mb": bill.bytes_down / 1e6,
        "mean_alpha": sum(d.alpha for d in sent) / max(len(sent), 1),
        "mean_beta": sum(d.beta for d in sent) / max(len(sent), 1),
        "devices_sat_out": kinds["sat out"],
        "devices_failed": kinds["failed"],
        "updates_refused": sum(refused.values()),
        "refused_because": refused,
        "updates_left_out": kinds["left out"],
        "devices_benched": len({d.device for d in devices if d.kind == "benched"}),
        "rounds_benched": kinds["benched"],
        "target_accuracy": target_accuracy,
        "rounds_to_target": rounds,
        "minutes_to_target": there and there.latency_s / 60,
        "kj_to_target": there and there.energy_j / 1e3,
    }
