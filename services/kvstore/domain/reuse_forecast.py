"""When blocks like one come back, learned from those that did: what keeping it is worth from here on.

Blocks are of one kind if they were used about as often and their session thinks about as long between two turns; those
that nobody has found yet, if their prompts brought about as many. For each kind the gaps between two uses are counted
in bins of age, each half as wide again as the one before. From the share F(t) of uses that came back within t, keeping
a block of age a until t brings (F(t) - F(a)) uses for the time it takes room, the integral of 1 - F from a to t.
`density` is the most that any t makes of that: uses a millisecond. (An index in the sense of Gittins, 1979; hit density
after Beckmann et al., LHD, NSDI 2018.) It rises towards the time at which the next turn is expected,
so a block whose session is thinking outlives one that has just come, and it falls when that has passed.

A kind with little experience borrows that of all with as many uses, and those that of all. Old experience is halved
away. Without any, all densities are 0. Decisions: docs/decisions/0141-think-time.md and 0166.
"""

import itertools
import math

BIN_0_MS = 1_000  # the first bin; calls of one request fall into it
BINS_A_DOUBLING = 2  # guess: finer than any law of think times needs
BINS = 28  # up to two and a half hours
USES_KINDS = 6  # 0, 1, 2-3, 4-7, 8-15, more
THINK_KINDS = 6  # unknown, below 4 s, then by factors of 4; of blocks that nobody has found yet: of what came at once
THINK_0_MS = 4_000
BROUGHT_0 = 16  # blocks; chosen, with what is counted, of four forms on the benchmark's traces: 0.01 apart (0166)
KINDS = USES_KINDS * THINK_KINDS
BORROWED_BY_USES = 50.0  # uses that a class of uses borrows from all; chosen on the conversation trace of the benchmark
BORROWED_BY_KIND = 1_000.0  # as above: 200 and 2,000 differ from it by less than 1 %
EXPERIENCE_MAX = 1_000_000.0  # uses; then halved: minutes on a busy node, days on a quiet one

_EDGES = [0.0] + [BIN_0_MS * 2 ** (bin_ / BINS_A_DOUBLING) for bin_ in range(BINS)]
_WIDTHS = [upper - lower for lower, upper in itertools.pairwise(_EDGES)]


def kind_of(uses: int, think_ms: float) -> int:
    """The kind of a block that was found `uses` times and whose session thinks that long; 0 = not known."""
    return min(uses.bit_length(), USES_KINDS - 1) * THINK_KINDS + _class_of(think_ms, THINK_0_MS)


def kind_of_new(brought: int) -> int:
    """The kind of a block that nobody has found yet and that came as one of so many; 0 = not known."""
    return _class_of(brought, BROUGHT_0)


def _class_of(size: float, first: float) -> int:
    """0 = not known; 1 below `first`, then by factors of 4."""
    return 0 if size <= 0 else 1 if size < first else min(2 + int(math.log2(size / first) / 2), THINK_KINDS - 1)


def bin_of(age_ms: float) -> int:
    """The bin of an age."""
    if age_ms < BIN_0_MS:
        return 0
    return min(BINS - 1, 1 + int(BINS_A_DOUBLING * math.log2(age_ms / BIN_0_MS)))


class ReuseForecast:
    """What is known of all kinds. `learn` turns new experience into densities."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._began = [0.0] * KINDS
        self._back = [[0.0] * BINS for _ in range(KINDS)]
        self._density = [[0.0] * BINS for _ in range(KINDS)]

    def began(self, kind: int, blocks: int = 1) -> None:
        """Blocks of a kind were used or stored: their next use is awaited."""
        self._began[kind] += blocks

    def came_back(self, kind: int, age_bin: int, blocks: int = 1) -> None:
        """They were used again at an age in that bin, whether they were still here or not."""
        self._back[kind][age_bin] += blocks

    def density(self, kind: int, age_ms: float) -> float:
        """Uses to be had by keeping a block of that kind and age, a millisecond of room."""
        return self._density[kind][bin_of(age_ms)]

    def learn(self) -> None:
        """Take in what has happened. O(kinds x bins^2): about 5 ms."""
        total, total_back = sum(self._began), _sums(self._back)
        if not total:
            return
        everywhere = [count / total for count in total_back]
        for uses in range(USES_KINDS):
            kinds = range(uses * THINK_KINDS, (uses + 1) * THINK_KINDS)
            began = sum(self._began[kind] for kind in kinds)
            alike = _mixed(_sums([self._back[kind] for kind in kinds]), began, everywhere, BORROWED_BY_USES)
            for kind in kinds:
                if self._began[kind]:
                    shares = _mixed(self._back[kind], self._began[kind], alike, BORROWED_BY_KIND)
                    self._density[kind] = _densities(shares)
        if total > EXPERIENCE_MAX:
            self._began = [count / 2 for count in self._began]
            self._back = [[count / 2 for count in counts] for counts in self._back]


def _sums(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _mixed(counts: list[float], began: float, borrowed: list[float], weight: float) -> list[float]:
    return [(count + weight * share) / (began + weight) for count, share in zip(counts, borrowed, strict=True)]


def _densities(shares: list[float]) -> list[float]:
    """By bin of age, from the share of uses that came back in each bin."""
    within = [0.0]
    for share in shares:
        within.append(min(1.0, within[-1] + share))
    room = [(1 - (within[bin_] + within[bin_ + 1]) / 2) * _WIDTHS[bin_] for bin_ in range(BINS)]
    found = []
    for now in range(BINS):
        best = taken = 0.0
        for until in range(now, BINS):
            taken += room[until]
            best = max(best, (within[until + 1] - within[now]) / max(taken, 1.0))
        found.append(best)
    return found
