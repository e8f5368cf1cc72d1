"""Run directories of any size in a moment: real fleets and real plans, but nothing is trained."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from anycostfl.config import Config, load_preset, to_toml
from anycostfl.planning.draw import draw_cohort
from anycostfl.planning.planner import plan_strategies
from anycostfl.planning.strategy import Binds, Reason
from anycostfl.records.journal import format_record
from anycostfl.records.round import DeviceRecord, RoundRecord, Status
from anycostfl.records.run import JOURNAL, TIMING, RunWriter


def planned_run(folder: Path, *overrides: str) -> Config:
    """Write the run directory that the demo would leave if learning followed a formula."""
    config = load_preset("demo", overrides)
    RunWriter.create(folder, to_toml(config))
    rounds = [planned_round(config, number) for number in range(config.run.rounds)]
    lines = [format_record(record) for record in rounds]
    (folder / JOURNAL).write_text("".join(line + "\n" for line in lines))
    timing = [{"round": number, "seconds": 0.5} for number in range(config.run.rounds)]
    (folder / TIMING).write_text("".join(json.dumps(item) + "\n" for item in timing))
    return config


def planned_round(config: Config, number: int) -> RoundRecord:
    """A round in which every device does exactly what was planned."""
    cohort = draw_cohort(config.fleet, seed=config.run.seed, round_index=number)
    planned = plan_strategies(cohort.devices, config.workload, config.limits_of("anycostfl"))
    size, given = config.workload.size_bits, cohort.devices
    bytes_up = np.round(planned.alpha * planned.beta * size / 8).astype(int)
    upload_s = 8 * bytes_up / given.rate_bps
    devices = tuple(
        DeviceRecord(
            device=int(cohort.index[i]),
            status=Status.OK if able else Status.INFEASIBLE,
            cause="" if able else str(Reason(int(planned.reason[i]))),
            samples=int(given.samples[i]),
            distance_m=float(cohort.distance_m[i]),
            rate_bps=float(given.rate_bps[i]),
            budget_j=float(given.energy_j[i]),
            alpha=float(planned.alpha[i]),
            beta=float(planned.beta[i]),
            frequency_hz=float(planned.frequency_hz[i]),
            bytes_up=int(bytes_up[i]),
            bytes_down=int(planned.alpha[i] * size / 8),
            compute_s=float(planned.latency_s[i] - upload_s[i]),
            upload_s=float(upload_s[i]),
            compute_j=float(planned.energy_j[i] - upload_s[i] * given.power_w[i]),
            upload_j=float(upload_s[i] * given.power_w[i]),
            binds=tuple(Binds(int(planned.binds[i])).words()),
        )
        for i, able in enumerate(planned.feasible.tolist())
    )
    return RoundRecord(number, 0.85 - 0.6 * math.exp(-number / 15), devices)


def unpacked(page: str) -> list[dict[str, Any]]:
    """The runs that a page holds."""
    found = re.search(r'id="data">([A-Za-z0-9+/=]+)</script>', page)
    assert found
    runs: list[dict[str, Any]] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return runs
