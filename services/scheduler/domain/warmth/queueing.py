"""How long requests wait for one of several servers: M/M/c with the correction of Allen and Cunneen for real variation.

A server is a request slot of an instance. Times in ms, rates per ms. The waiting of those who wait is taken as
exponential. Sources: Erlang C; Allen, Probability, Statistics and Queueing Theory (1990), section 5.3.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes to one model."""

    rate_per_ms: float
    service_ms: float
    variation: float = 1.0  # (Ca² + Cs²) / 2: mean of the squared variations of gaps and service; 1 = M/M/c

    @property
    def load(self) -> float:
        """Servers that are busy on average."""
        return self.rate_per_ms * self.service_ms


def waiting_share(servers: int, load: float) -> float:
    """Erlang C: the share of requests that wait. 1 where the servers cannot keep up. O(servers)."""
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_ms_mean(traffic: Traffic, servers: int) -> float:
    """The mean wait of all requests; infinite where the servers cannot keep up."""
    if traffic.load <= 0:
        return 0.0
    if traffic.load >= servers:
        return math.inf
    waiting = waiting_share(servers, traffic.load)
    return traffic.variation * waiting * traffic.service_ms / (servers - traffic.load)


def late_share(traffic: Traffic, servers: int, wait_ms: float) -> float:
    """The share of requests that wait longer than this."""
    if traffic.load <= 0:
        return 0.0
    if traffic.load >= servers:
        return 1.0
    waiting = waiting_share(servers, traffic.load)
    mean_ms = traffic.variation * traffic.service_ms / (servers - traffic.load)  # of those who wait
    return waiting * math.exp(-wait_ms / mean_ms)
