"""Accuracy and cost of a run, as one flat table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from anycostfl.records.round import RoundRecord, Status, refusals, rounds_to, total


def summarise(
    method: str, target_accuracy: float, records: Sequence[RoundRecord]
) -> dict[str, object]:
    """Accuracy, cost, and the cost up to the first round that reached the target."""
    accuracies = [r.accuracy for r in records if r.accuracy is not None]
    devices = [device for record in records for device in record.devices]
    sent = [d for d in devices if d.bytes_up]
    kinds, refused = Counter(d.status for d in devices), refusals(records)
    rounds = rounds_to(target_accuracy, records)
    spent, there = total(records), None if rounds is None else total(records[:rounds])
    return {
        "method": method,
        "rounds": len(records),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "simulated_minutes": spent.latency_s / 60,
        "energy_kj": spent.energy_j / 1e3,
        "uploaded_mb": spent.bytes_up / 1e6,
        "downloaded_mb": spent.bytes_down / 1e6,
        "mean_alpha": sum(d.alpha for d in sent) / max(len(sent), 1),
        "mean_beta": sum(d.beta for d in sent) / max(len(sent), 1),
        "devices_sat_out": kinds[Status.INFEASIBLE],
        "devices_failed": kinds[Status.FAILED],
        "updates_refused": sum(refused.values()),
        "refused_because": refused,
        "updates_left_out": kinds[Status.EXCLUDED],
        "devices_benched": len({d.device for d in devices if d.status is Status.SUSPENDED}),
        "rounds_benched": kinds[Status.SUSPENDED],
        "target_accuracy": target_accuracy,
        "rounds_to_target": rounds,
        "minutes_to_target": there and there.latency_s / 60,
        "kj_to_target": there and there.energy_j / 1e3,
    }
