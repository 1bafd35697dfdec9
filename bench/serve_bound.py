"""The load that no server can exceed at a quantile of latency: a queue whose service is the floor's run and no more.

Requests come as a Poisson process, each takes the same time, and the first that came is answered first, by the next of
c cores that is free: M/D/c (Crommelin, "Delay Probability Formulae When the Holding Times are Constant", 1932). It is
simulated: where all take the same time, cores take requests in turns, so that each waits for the one that came c before
it, and waiting times are a cumulated sum above its least value so far (Lindley, "The Theory of Queues with a Single
Server", 1952).

A server that merges requests may exceed it, for a larger run may take less time a row than the floor's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_REQUESTS = 2_000_000
#: Of the utilisation that is found.
_PRECISION = 0.002


def latencies(service: float, rate: float, cores: int, count: int, seed: int) -> npt.NDArray[np.float64]:
    """Simulate seconds from a request's arrival to its answer, float64 [about count].

    Args:
        service: seconds of a request.
        rate: of requests, a second.
        cores: each of which serves one request at a time.
        count: of requests.
        seed: of arrivals.
    """
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    seconds = []
    for first in range(cores):
        pauses = np.diff(arrivals[first::cores])
        walk = np.concatenate(([0.0], np.cumsum(service - pauses)))
        seconds.append(walk - np.minimum.accumulate(walk) + service)
    return np.concatenate(seconds)


def highest_utilisation(service: float, limit: float, quantile: float, cores: int = 1) -> float:
    """Find the share of the cores' time at which a quantile of latency reaches a limit in seconds; 0: none does."""
    low, high = 0.0, 1.0
    while high - low > _PRECISION:
        share = (low + high) / 2
        seconds = latencies(service, share * cores / service, cores, _REQUESTS, 1)
        if np.quantile(seconds, quantile) < limit:
            low = share
        else:
            high = share
    return low
