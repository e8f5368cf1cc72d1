"""Costs equal hand-computed values and move the way the physics does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anycostfl.planning import cost
from anycostfl.planning.cost import Devices, Workload, make_devices

WORKLOAD = Workload(flops_per_sample=2e6, size_bits=8e6, epochs=3)
DEVICES = make_devices(
    samples=100,
    flops_per_cycle=4,
    energy_coefficient=1e-26,
    frequency_min_hz=1e8,
    frequency_max_hz=1e9,
    rate_bps=1e6,
    power_w=0.5,
    latency_s=10,
    energy_j=10,
)


def test_one_round_by_hand() -> None:
    # 3 epochs × 100 samples × 2e6 FLOPs / 4 per cycle = 1.5e8 cycles; half of them at 5e8 Hz
    alpha, beta, frequency = np.array([0.5]), np.array([0.1]), np.array([5e8])
    assert cost.compute_cycles(DEVICES, WORKLOAD)[0] == 1.5e8
    latency, energy = cost.round_cost(DEVICES, WORKLOAD, alpha, beta, frequency)
    assert latency[0] == pytest.approx(0.15 + 0.4)  # 0.5 × 0.1 × 8e6 bit / 1e6 bit/s
    assert energy[0] == pytest.approx(1e-26 * 2.5e17 * 7.5e7 + 0.4 * 0.5)


def test_overhead_is_paid_at_every_width() -> None:
    slow = make_devices(**{n: getattr(DEVICES, n) for n in Devices.__slots__} | {"overhead": 0.1})
    alpha = np.array([0.5])
    cycles = cost.sub_model_cycles(slow, WORKLOAD, alpha)
    assert cycles[0] == pytest.approx(0.6 * 1.5e8)
    assert cost.compute_time_s(cycles, np.array([1e9]))[0] == pytest.approx(0.09)


def test_path_loss_is_the_macro_cell_model() -> None:
    loss_db = -10 * np.log10(cost.path_gain([1000.0, 100.0]))
    assert loss_db == pytest.approx([128.1, 128.1 - 37.6])


def test_rate_is_shannons() -> None:
    # three times the noise: two bits per second and hertz
    noise_w = 10 ** ((-174 - 30) / 10) * 1e6
    assert cost.uplink_rate_bps(1e6, 3.0, noise_w) == pytest.approx(2e6)


@given(
    alpha=st.floats(0.01, 0.99),
    beta=st.floats(0.001, 0.99),
    frequency=st.floats(1e8, 1e9),
    factor=st.floats(1.001, 1.01),
)
def test_cost_rises_with_width_and_payload_and_clock_trades_time_for_energy(
    alpha: float, beta: float, frequency: float, factor: float
) -> None:
    def at(a: float, b: float, f: float) -> tuple[float, float]:
        latency, energy = cost.round_cost(
            DEVICES, WORKLOAD, np.array([a]), np.array([b]), np.array([f])
        )
        return float(latency[0]), float(energy[0])

    base = at(alpha, beta, frequency)
    for more in (at(alpha * factor, beta, frequency), at(alpha, beta * factor, frequency)):
        assert more[0] > base[0]
        assert more[1] > base[1]
    faster = at(alpha, beta, frequency * factor)
    assert faster[0] < base[0]
    assert faster[1] > base[1]
