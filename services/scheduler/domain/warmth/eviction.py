"""Which models leave when memory is short: rules that hold under every policy, and the policies that only rank.

A pinned, running or awaited model is never a candidate (invariant 8), nor one that was loaded a moment ago: a model
that has been paid for serves before it leaves. A policy gives each candidate a worth; those of least worth leave, just
enough of them, each with a reason for the audit stream. `value.py` has our own policy. Sources: LFU with ageing (Arlitt
et al. 1999); GreedyDual-Size-Frequency (Cherkasova 1998): clock + uses × cost / size.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.domain.records import VersionKey

RESIDENCE_LEAST_MS = 2_000  # a guess: a load takes about that long, so loading takes at most half of a place's time
LFU_HALF_LIFE_MS = 600_000  # a guess: ten minutes, the common keep-alive
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Use:
    """A request arrived for a model."""

    version: VersionKey
    at_ms: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident model."""

    version: VersionKey
    bytes: int
    reload_ms: int  # from the tier it would fall to
    loaded_ms: int  # when it became ready
    pinned: bool = False
    in_use: bool = False
    awaited: bool = False  # requests wait for it


@dataclass(frozen=True, slots=True)
class Victim:
    """A model that leaves, and why it rather than another."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """These leave, in order."""

    victims: tuple[Victim, ...]


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Even all candidates together do not make the room."""

    missing_bytes: int
    reason: str


class EvictionPolicy(Protocol):
    """Ranks. Larger is worth more; a policy never sees what the rules exclude."""

    @property
    def name(self) -> str:
        """For records."""
        ...

    def record(self, use: Use) -> None:
        """A request arrived. O(1) or little more."""
        ...

    def evicted(self, candidate: Candidate, now_ms: int) -> None:
        """It left by this policy's choice."""
        ...

    def worth(self, candidate: Candidate, now_ms: int) -> float:
        """What is lost if it leaves; only the order matters."""
        ...

    def explain(self, candidate: Candidate, now_ms: int) -> str:
        """Its worth in words."""
        ...


def protected(candidate: Candidate, now_ms: int, least_ms: int = RESIDENCE_LEAST_MS) -> str:
    """Why a model may not leave now; empty if it may."""
    if candidate.pinned:
        return "pinned"
    if candidate.in_use:
        return "in use"
    if candidate.awaited:
        return "awaited"
    return "just loaded" if now_ms - candidate.loaded_ms < least_ms else ""


def choose(
    policy: EvictionPolicy,
    resident: Iterable[Candidate],
    bytes_wanted: int,
    now_ms: int,
    least_ms: int = RESIDENCE_LEAST_MS,
) -> Chosen | NotEnough:
    """Make room: the models of least worth, without any that is not needed after all (case B22). O(n log n)."""
    allowed, kept = list[Candidate](), dict[str, int]()
    for each in resident:
        if why := protected(each, now_ms, least_ms):
            kept[why] = kept.get(why, 0) + 1
        else:
            allowed.append(each)
    room = sum(each.bytes for each in allowed)
    if room < bytes_wanted:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(kept.items())) or "no model is resident"
        return NotEnough(bytes_wanted - room, f"{len(allowed)} models may leave; {counts}")
    worths = sorted((policy.worth(each, now_ms), each.version, place) for place, each in enumerate(allowed))
    chosen = _just_enough([allowed[place] for _, _, place in worths], bytes_wanted)
    victims = tuple(Victim(each, f"{policy.name}: {policy.explain(each, now_ms)}") for each in chosen)
    for each in chosen:
        policy.evicted(each, now_ms)
    return Chosen(victims)


def _just_enough(ordered: Sequence[Candidate], bytes_wanted: int) -> list[Candidate]:
    chosen, missing = list[Candidate](), bytes_wanted
    for each in ordered:
        if missing <= 0:
            break
        chosen.append(each)
        missing -= each.bytes
    for each in reversed(chosen.copy()):  # the one worth most is spared first
        if missing + each.bytes <= 0:
            chosen.remove(each)
            missing += each.bytes
    return chosen


@dataclass(slots=True)
class LeastRecentlyUsed:
    """LRU."""

    name: str = "lru"
    used_ms: dict[VersionKey, int] = field(default_factory=dict)

    def record(self, use: Use) -> None:
        """See `EvictionPolicy`."""
        self.used_ms[use.version] = use.at_ms

    def evicted(self, candidate: Candidate, now_ms: int) -> None:
        """See `EvictionPolicy`."""
        self.used_ms.pop(candidate.version, None)

    def worth(self, candidate: Candidate, now_ms: int) -> float:
        """See `EvictionPolicy`."""
        return self.used_ms.get(candidate.version, candidate.loaded_ms)

    def explain(self, candidate: Candidate, now_ms: int) -> str:
        """See `EvictionPolicy`."""
        return f"last used {(now_ms - self.worth(candidate, now_ms)) / 1000:.0f} s ago"


@dataclass(slots=True)
class LeastFrequentlyUsed:
    """LFU whose counts halve every half-life: the log of the count, moved to a common time, so that none is scaled."""

    name: str = "lfu"
    half_life_ms: int = LFU_HALF_LIFE_MS
    scores: dict[VersionKey, float] = field(default_factory=dict)  # log2 of the sum over uses of 2^(time / half-life)

    def record(self, use: Use) -> None:
        """See `EvictionPolicy`. Counts live on after an eviction."""
        now, score = use.at_ms / self.half_life_ms, self.scores.get(use.version)
        if score is None:
            self.scores[use.version] = now
        else:
            high = max(now, score)
            self.scores[use.version] = high + math.log2(2 ** (now - high) + 2 ** (score - high))

    def evicted(self, candidate: Candidate, now_ms: int) -> None:
        """See `EvictionPolicy`."""

    def worth(self, candidate: Candidate, now_ms: int) -> float:
        """See `EvictionPolicy`."""
        return self.scores.get(candidate.version, candidate.loaded_ms / self.half_life_ms - 1)

    def explain(self, candidate: Candidate, now_ms: int) -> str:
        """See `EvictionPolicy`."""
        return f"{2 ** (self.worth(candidate, now_ms) - now_ms / self.half_life_ms):.2f} uses, old ones counted less"


@dataclass(slots=True)
class GreedyDualSizeFrequency:
    """GDSF. A model that was evicted starts again with one use."""

    name: str = "gdsf"
    clock: float = 0.0
    uses: dict[VersionKey, int] = field(default_factory=dict)
    clocks: dict[VersionKey, float] = field(default_factory=dict)

    def record(self, use: Use) -> None:
        """See `EvictionPolicy`."""
        self.uses[use.version] = self.uses.get(use.version, 0) + 1
        self.clocks[use.version] = self.clock

    def evicted(self, candidate: Candidate, now_ms: int) -> None:
        """See `EvictionPolicy`: the clock moves to the worth of what left."""
        self.clock = max(self.clock, self.worth(candidate, now_ms))
        self.uses.pop(candidate.version, None)
        self.clocks.pop(candidate.version, None)

    def worth(self, candidate: Candidate, now_ms: int) -> float:
        """See `EvictionPolicy`."""
        uses = self.uses.get(candidate.version, 1)
        cost = candidate.reload_ms * MIB / candidate.bytes
        return self.clocks.get(candidate.version, self.clock) + uses * cost

    def explain(self, candidate: Candidate, now_ms: int) -> str:
        """See `EvictionPolicy`."""
        uses = self.uses.get(candidate.version, 1)
        return f"{uses} uses, {candidate.reload_ms} ms to load again, {candidate.bytes / MIB:.0f} MiB"
