"""What a round was: every device's status, what it did and paid; sums and summary of rounds."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from anycostfl.metrics import MetricInfo


class Status(enum.StrEnum):
    """What became of a device in a round."""

    OK = "ok"  # the update was used
    INFEASIBLE = "infeasible"  # no strategy fits its budgets
    SUSPENDED = "suspended"  # it was refused too often
    MISSING = "missing"  # no reply, or not in time
    FAILED = "failed"  # the device reported that it has no update
    REFUSED = "refused"  # the reply is not an update of what was asked
    EXCLUDED = "excluded"  # its updates point away from those of the others
    UNUSED = "unused"  # the update is fine, but too few arrived to use it


@dataclass(frozen=True, slots=True)
class Measured:
    """What a round took on a real device, as the device reports it; None is not measured.

    A device knows how long its upload took when it is over, so it reports that with its next round:
    `earlier_upload_s` is that of round `earlier_round`. What is `used` are shares of the device's
    budgets, which it need not disclose.
    """

    download_s: float | None = None
    decode_s: float | None = None
    train_s: float | None = None
    encode_s: float | None = None
    joules: float | None = None
    energy_used: float | None = None
    memory_bytes: float | None = None  # at its peak
    memory_used: float | None = None
    clock_hz: float | None = None
    celsius: float | None = None
    throttled: bool | None = None
    earlier_round: int | None = None
    earlier_upload_s: float | None = None
    earlier_time_used: float | None = None

    @property
    def until_upload_s(self) -> float | None:
        """Seconds until the upload began, if they are all known."""
        parts = (self.download_s, self.decode_s, self.train_s, self.encode_s)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What one device of a cohort did, and what it paid.

    `cause` is one word that says why a status is not ok (`damaged`, `energy`, …), `detail` a
    sentence about it.
    """

    device: int
    status: Status
    cause: str = ""
    detail: str = ""
    samples: int = 0
    distance_m: float = 0.0
    rate_bps: float = 0.0
    budget_j: float = 0.0
    budget_s: float = 0.0  # 0 in journals of schema 1 and 2: all devices had the fleet's
    alpha: float = 0.0
    beta: float = 0.0
    frequency_hz: float = 0.0
    gain: float = 0.0
    flops_ratio: float = 0.0
    work: float = 1.0  # share of the configured epochs that was computed
    weight: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    wire_bytes_up: int = 0  # of whole messages; 0 in the simulator, which sends none
    wire_bytes_down: int = 0
    compute_s: float = 0.0
    upload_s: float = 0.0
    compute_j: float = 0.0
    upload_j: float = 0.0
    busy_s: float = 0.0  # how long a real device worked, as it reports; 0 in the simulator
    binds: tuple[str, ...] = ()
    duplicates: int = 0  # further replies of the device in this round, all refused
    agreement: float | None = None  # cosine with the others' updates, where it was computed
    done: float = 1.0  # share of the planned steps that the device had time for
    measured: Measured | None = None  # on real devices

    @property
    def latency_s(self) -> float:
        """Computing, then uploading."""
        return self.compute_s + self.upload_s

    @property
    def energy_j(self) -> float:
        """Of computing and of uploading."""
        return self.compute_j + self.upload_j

    @property
    def explained(self) -> str:
        """The status with its cause and detail, as one line."""
        return ": ".join(filter(None, (self.status, self.cause, self.detail)))


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round: how good the model is after it, and what each device of the cohort did.

    `metric` is the value of the task's metric, `others` are further ones by their names.
    """

    round: int
    metric: float | None
    devices: tuple[DeviceRecord, ...]
    step_bytes: int = 0  # of the step to the next public model, if there is one (`downlink`)
    others: Mapping[str, float] = field(default_factory=dict)
    epsilon: float | None = None  # spent by the device that took part most often, if it is counted
    remark: str = ""  # what happened to the model besides, such as going back to an earlier one

    @property
    def latency_s(self) -> float:
        """The round lasts as long as its slowest device."""
        return max((d.latency_s for d in self.devices), default=0.0)

    @property
    def energy_j(self) -> float:
        """Of all devices together."""
        return sum(d.energy_j for d in self.devices)

    @property
    def bytes_up(self) -> int:
        """All payloads."""
        return sum(d.bytes_up for d in self.devices)

    @property
    def bytes_down(self) -> int:
        """All sub-models, or steps to the public model."""
        return sum(d.bytes_down for d in self.devices)


Records = Sequence[RoundRecord]


@dataclass(frozen=True, slots=True)
class Totals:
    """What rounds cost together.

    `passes` counts samples times the work and the share of the full model's FLOPs that each took.
    """

    rounds: int = 0
    latency_s: float = 0.0
    energy_j: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    passes: float = 0.0

    def after(self, record: RoundRecord) -> Totals:
        """The totals with one more round."""
        return Totals(
            rounds=self.rounds + 1,
            latency_s=self.latency_s + record.latency_s,
            energy_j=self.energy_j + record.energy_j,
            bytes_up=self.bytes_up + record.bytes_up,
            bytes_down=self.bytes_down + record.bytes_down,
            passes=self.passes + sum(d.flops_ratio * d.work * d.samples for d in record.devices),
        )


def running_totals(records: Records) -> list[Totals]:
    """What had been spent before the first round and after every one."""
    return list(accumulate(records, Totals.after, initial=Totals()))


def total(records: Records) -> Totals:
    """What these rounds cost together."""
    return running_totals(records)[-1]


def rounds_to(target: float | None, info: MetricInfo, records: Records) -> int | None:
    """After how many rounds a target was first reached; None if it was not, or there is none."""
    if target is None:
        return None
    reached = (i for i, r in enumerate(records, 1) if info.reaches(r.metric, target))
    return next(reached, None)


def refusals(records: Records) -> dict[str, int]:
    """How many replies were refused, by cause; the most frequent first."""
    causes: Counter[str] = Counter()
    for device in (d for record in records for d in record.devices):
        if device.status is Status.REFUSED:
            causes[device.cause] += 1
        if device.duplicates:
            causes["duplicate"] += device.duplicates
    return dict(causes.most_common())


def summarise(
    method: str, info: MetricInfo, target: float | None, records: Records
) -> dict[str, object]:
    """Metric, cost, and the cost up to the first round that reached the target."""
    values = [r.metric for r in records if r.metric is not None]
    others = next((dict(r.others) for r in reversed(records) if r.metric is not None), {})
    devices = [device for record in records for device in record.devices]
    sent = [d for d in devices if d.bytes_up]
    kinds, refused = Counter(d.status for d in devices), refusals(records)
    rounds = rounds_to(target, info, records)
    spent, there = total(records), None if rounds is None else total(records[:rounds])
    return {
        "method": method,
        "rounds": len(records),
        "metric": info.name,
        "final": values[-1] if values else None,
        "best": info.best(values),
        "others": others,
        "simulated_minutes": spent.latency_s / 60,
        "energy_kj": spent.energy_j / 1e3,
        "uploaded_mb": spent.bytes_up / 1e6,
        "downloaded_mb": spent.bytes_down / 1e6,
        "mean_alpha": sum(d.alpha for d in sent) / max(len(sent), 1),
        "mean_beta": sum(d.beta for d in sent) / max(len(sent), 1),
        "devices_infeasible": kinds[Status.INFEASIBLE],
        "devices_failed": kinds[Status.FAILED],
        "updates_refused": sum(refused.values()),
        "refused_because": refused,
        "updates_excluded": kinds[Status.EXCLUDED],
        "devices_suspended": len({d.device for d in devices if d.status is Status.SUSPENDED}),
        "rounds_suspended": kinds[Status.SUSPENDED],
        "epsilon": records[-1].epsilon if records else None,
        "rounds_remarked": sum(bool(record.remark) for record in records),
        "target": target,
        "rounds_to_target": rounds,
        "minutes_to_target": there and there.latency_s / 60,
        "kj_to_target": there and there.energy_j / 1e3,
    }
