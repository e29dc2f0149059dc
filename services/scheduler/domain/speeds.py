"""How fast each instance brings first tokens, learned from the requests that ended there.

Two numbers an instance: the prefill time of one uncached token, and the first-token time of its usual request (what a
full instance makes the next one wait about once more). Moving averages; an instance that nothing is known of is taken
to be as fast as the same version elsewhere, else as `PRIOR_TOKEN_US`. And one a version: what a hand-over costs, from
the first token on one node to the next on another; blocks are moved while the prompt is computed, so that it does not
grow with the prompt as long as the network is faster than the prefill. Pure; each replica learns from its share.

What is measured decides where requests go, and only where they go is measured: so one slow request moves an average by
little (`OUTLIER`), and a measurement is forgotten in time (`HALF_LIFE_MS`), or what was slow once is never asked again.
docs/decisions/0179-an-outlier-ends-nothing.md.
"""

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.scheduler.domain.records import InstanceKey, VersionKey, base_of

PRIOR_TOKEN_US = 100  # 10,000 tokens/s: a 7B model's prefill on one data-centre GPU, to the nearest power of ten
PRIOR_HANDOFF_US = 10_000  # two messages and the first read, a guess, until one was measured
KEEP = 0.8  # of an average at each request: about the last five, so that a slow node is known within seconds
OUTLIER = 4.0  # times what was expected is the most that one request counts, a guess; a cold start is 100 times it
HALF_LIFE_MS = 60_000  # a guess: what stays slow costs a request or so a minute to find out
TOKENS_LEAST = 32  # a shorter prompt says more of the round trip than of the prefill
INSTANCES_MOST = 20_000  # 1,000 nodes with 20 models each; the one learned of longest ago is forgotten first


@dataclass(frozen=True, slots=True)
class Speed:
    """What is known of one instance, or of one version anywhere."""

    token_us: float
    first_us: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's way to its first token."""

    instance: InstanceKey
    version: VersionKey
    uncached_tokens: int
    first_token_ms: int  # from the start of its stream


Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Measured(Generic[Value]):
    """An average, and when it was last measured."""

    value: Value
    at_ms: int


@dataclass(slots=True)
class Speeds:
    """All instances. Mutable."""

    instances: dict[InstanceKey, _Measured[Speed]] = field(default_factory=dict)
    versions: dict[VersionKey, Speed] = field(default_factory=dict)
    handoffs_us: dict[VersionKey, _Measured[float]] = field(default_factory=dict)

    def learn(self, seen: FirstToken, now_ms: int) -> None:
        """Take a finished request in. O(1)."""
        if seen.first_token_ms <= 0:
            return
        version = base_of(seen.version)
        before = self.of(seen.instance, version, now_ms) if version in self.versions else None
        _renew(self.instances, seen.instance, _Measured(_moved(before, seen), now_ms))
        _renew(self.versions, version, _moved(self.versions.get(version), seen))

    def learn_handoff(self, version: VersionKey, handoff_ms: int, now_ms: int) -> None:
        """Take a hand-over in; 0 = this request had none. O(1)."""
        if handoff_ms > 0:
            moved_us = _average(self.handoff_us(version, now_ms), handoff_ms * 1000.0)
            _renew(self.handoffs_us, base_of(version), _Measured(moved_us, now_ms))

    def handoff_us(self, version: VersionKey, now_ms: int) -> float:
        """What handing over a prompt of a version is expected to cost."""
        found = self.handoffs_us.get(base_of(version))
        return PRIOR_HANDOFF_US if found is None else _faded(found.value, PRIOR_HANDOFF_US, now_ms - found.at_ms)

    def of(self, instance: InstanceKey, version: VersionKey, now_ms: int) -> Speed:
        """The expectation for an instance."""
        found, elsewhere = self.instances.get(instance), self.versions.get(base_of(version))
        if found is None or elsewhere is None:
            return elsewhere or (found.value if found else Speed(PRIOR_TOKEN_US, 0.0))
        here, age_ms = found.value, now_ms - found.at_ms
        return Speed(
            _faded(here.token_us, elsewhere.token_us, age_ms), _faded(here.first_us, elsewhere.first_us, age_ms)
        )


def _renew(known: dict[Key, Value], key: Key, value: Value) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > INSTANCES_MOST:
        del known[next(iter(known))]


def _faded(measured: float, otherwise: float, age_ms: int) -> float:
    return otherwise + (measured - otherwise) * math.pow(0.5, max(0, age_ms) / HALF_LIFE_MS)


def _average(before: float, seen: float) -> float:
    return KEEP * before + (1 - KEEP) * min(seen, OUTLIER * before)


def _moved(before: Speed | None, seen: FirstToken) -> Speed:
    first_us = seen.first_token_ms * 1000.0
    long = seen.uncached_tokens >= TOKENS_LEAST
    token_us = first_us / seen.uncached_tokens if long else float(PRIOR_TOKEN_US)
    if before is None:
        return Speed(token_us, first_us)
    return Speed(_average(before.token_us, token_us) if long else before.token_us, _average(before.first_us, first_us))
