"""How many replicas a model wants: as many as its promise needs, more at once, fewer only when that will last.

Up: as soon as the prediction says that too many requests would wait too long. Down: only if fewer would still be enough
for a quarter more traffic, and have been for five minutes. So a rate that stays within a quarter never moves the count
back and forth (a planner that compares the utilisation of N with that of N - 1 does: 2, 1, 2, 1).

It decides wants, not places: `memory_plan.py` does that under the budget.
"""

from dataclasses import dataclass

from services.scheduler.domain.warmth.queueing import Traffic, late_share, wait_ms_mean

HEADROOM = 1.25  # fewer replicas must do for this much more traffic: a guess
HOLD_MS = 300_000  # and for this long: a guess, well above a load and Dynamo's planning interval of 180 s
REPLICAS_MOST = 64  # a model that wants more is mis-measured, or a case for people


@dataclass(frozen=True, slots=True)
class Promise:
    """A share of the requests starts within a time."""

    wait_ms: int
    share: float = 0.95


@dataclass(frozen=True, slots=True)
class Wanted:
    """Replicas that a model wants, and the memory of the hysteresis."""

    replicas: int
    low_since_ms: int = -1  # since when fewer would do; negative: they would not
    reason: str = ""


def needed(traffic: Traffic, slots: int, promise: Promise) -> int:
    """The least replicas that keep the promise; 0 without traffic. O(result × slots)."""
    if traffic.load <= 0:
        return 0
    first = max(1, int(traffic.load / slots))
    for replicas in range(first, REPLICAS_MOST):
        if late_share(traffic, replicas * slots, promise.wait_ms) <= 1 - promise.share:
            return replicas
    return REPLICAS_MOST


def adjusted(before: Wanted, traffic: Traffic, slots: int, promise: Promise, now_ms: int) -> Wanted:
    """The next want. Call it at any interval; repeating it with the same arguments changes nothing."""
    now = needed(traffic, slots, promise)
    if now > before.replicas:
        late = late_share(traffic, before.replicas * slots, promise.wait_ms) if before.replicas else 1.0
        reason = f"{late:.0%} would wait over {promise.wait_ms} ms with {before.replicas}, {1 - promise.share:.0%} may"
        return Wanted(now, -1, reason)
    calm = Traffic(traffic.rate_per_ms * HEADROOM, traffic.service_ms, traffic.variation)
    fewer = needed(calm, slots, promise)
    if fewer >= before.replicas:
        return Wanted(before.replicas, -1, before.reason)
    since_ms = before.low_since_ms if before.low_since_ms >= 0 else now_ms
    if now_ms - since_ms < HOLD_MS:
        return Wanted(before.replicas, since_ms, before.reason)
    return Wanted(fewer, -1, f"{fewer} have been enough for {HEADROOM:g} times the traffic for {HOLD_MS // 1000} s")


def gain_per_ms(traffic: Traffic, slots: int, replicas: int, wait_ms_most: float) -> float:
    """Waiting saved per ms by this replica over having one fewer; waits count at most `wait_ms_most`. First = 1."""
    before = wait_ms_mean(traffic, (replicas - 1) * slots) if replicas > 1 else wait_ms_most
    after = wait_ms_mean(traffic, replicas * slots)
    return traffic.rate_per_ms * max(0.0, min(before, wait_ms_most) - min(after, wait_ms_most))
