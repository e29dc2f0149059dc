"""Which adapter has which of the names that a vLLM instance was told when it was loaded.

Its backend reads names and paths once, and vLLM remembers an adapter by its name's place in that list. So the names are
given out in advance, without adapters, and an adapter keeps the one that it got for as long as the instance stands: a
name never means two contents in one load, and what somebody remembers of an earlier load means nothing in the next.
Decision: docs/decisions/0150-adapters-over-vllm.md.
"""

from dataclasses import dataclass, field

from roundhouse.vocabulary import Digest

LEAST_BERTHS = 8_192  # thousands of adapters over one base; a list of a megabyte
SPARE = 4  # times as many as the catalogue declares when the instance is loaded: adapters come and change. A guess.


@dataclass(frozen=True, slots=True)
class AllTaken:
    """So many adapters were used since the instance was loaded that no name is left."""

    count: int


@dataclass(slots=True)
class Berths:
    """Of one loaded instance."""

    name: str  # of this load: differs from that of every other
    folder: str  # where the instance looks: one entry a number, once it is given out
    count: int
    rank_max: int  # what the instance has room for
    taken: dict[Digest, int] = field(default_factory=dict)

    def take(self, digest: Digest) -> int | AllTaken:
        """The number of an adapter: the one that it has, or the next. Idempotent."""
        number = self.taken.get(digest, len(self.taken))
        if number >= self.count:
            return AllTaken(self.count)
        self.taken[digest] = number
        return number

    def called(self, number: int) -> str:
        """What a request has to call it."""
        return f"{self.name}-{number}"


def berths_for(declared: int) -> int:
    """How many an instance is given whose base has so many adapters now."""
    return max(LEAST_BERTHS, SPARE * declared)
