"""The simulated bound of serving, against what is known of such queues."""

from __future__ import annotations

import numpy as np
import pytest

from bench.serve_bound import highest_utilisation, latencies


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_one_core_waits_as_pollaczek_and_khinchine_say(share: float) -> None:
    service = 0.004
    waits = latencies(service, share / service, 1, 1_000_000, 1)
    assert waits.min() == pytest.approx(service)
    assert waits.mean() == pytest.approx(service + share * service / (2 * (1 - share)), rel=0.03)


def test_cores_serve_as_one_queue() -> None:
    """Against each request given to the core that is free first."""
    service, rate, count = 1.0, 1.6, 5000
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / rate, count))
    free, expected = [0.0, 0.0], []
    for moment in arrivals:
        core = int(np.argmin(free))
        free[core] = max(free[core], moment) + service
        expected.append(free[core] - moment)
    assert np.sort(latencies(service, rate, 2, count, 3)) == pytest.approx(np.sort(expected))


def test_the_highest_utilisation() -> None:
    """A limit below the service time allows no load; the nearer the two are, the lower the utilisation."""
    assert highest_utilisation(0.011, 0.010, 0.99) == 0
    shares = [highest_utilisation(service, 0.010, 0.99) for service in (0.004, 0.001, 0.0003)]
    assert shares == sorted(shares)
    assert 0.1 < shares[0] < 0.5 < 0.65 < shares[1] < shares[2] < 1
