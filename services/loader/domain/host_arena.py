"""Where in the host arena each piece lies, and who leaves so that another fits. Pure: it moves no byte.

    arena  |piece a |piece b     |.......|piece c |...............|      offsets are multiples of `page`

A piece is one range, so that an engine maps it with one call and reads it as one array. Ranges are never moved while
somebody may have mapped them, so free bytes can be there and still no gap: then more leaves, oldest first.
Invariant: no two ranges overlap, and the ranges are those of the ledger's pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundhouse.vocabulary import Digest
from services.loader.domain.contents import ContentLedger, Piece
from services.loader.domain.memory_ledger import NoRoom
from services.loader.domain.room import NotEnough


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes `offset` to `offset + size` of the arena; `size` includes what rounds up to a page."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Room was made: the arena as it is then, and who had to leave."""

    arena: "HostArena"
    evicted: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class HostArena:
    """The account of the arena and its map."""

    ledger: ContentLedger
    page: int = 1  # bytes; ranges begin and end at multiples
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.ranges.keys() == self.ledger.pieces.keys()

    def rounded(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces with the bytes that they take here."""
        return [Piece(each.key, -(-each.size // self.page) * self.page) for each in pieces]

    def settle(self, digest: Digest, pieces: Sequence[Piece], unused: Sequence[Digest]) -> Settled | NotEnough:
        """Reserve ranges for a version; of `unused`, in that order, as many leave as need to. All or nothing.

        `pieces` are as they are on disk. O(unused² × ranges)."""
        wanted = self.rounded(pieces)
        offered = [each for each in unused if each in self.ledger.contents and each != digest]
        for count in range(len(offered) + 1):
            made = self._without(digest, wanted, offered[:count])
            if made is not None:
                return self._with_fewer(digest, wanted, offered[:count], made)
        made = self.release(*offered)._without(digest, wanted, [])  # what they share with it lies in the way
        if made is not None:
            return Settled(made, tuple(offered))
        answer = self.ledger.reserve(digest, wanted, offered)
        return NotEnough(answer.missing if isinstance(answer, NoRoom) else self.page)

    def commit(self, digest: Digest) -> "HostArena":
        """Every byte of the version is there."""
        pieces = [Piece(key, self.ledger.pieces[key].size) for key in self.ledger.contents[digest]]
        return replace(self, ledger=self.ledger.commit(digest, pieces))

    def release(self, *digests: Digest) -> "HostArena":
        """These versions are not here any more. Idempotent."""
        ledger = self.ledger.release(*digests)
        return replace(self, ledger=ledger, ranges=_kept(self.ranges, ledger))

    def adopt(self, digest: Digest, ranges: Mapping[str, Range]) -> "HostArena | None":
        """Take over what an earlier process left; None if it does not fit the map."""
        pieces = [Piece(key, where.size) for key, where in ranges.items()]
        fresh = {key: where for key, where in ranges.items() if key not in self.ranges}
        ledger = self.ledger.reserve(digest, pieces)
        if isinstance(ledger, NoRoom) or any(self.ranges.get(key, where) != where for key, where in ranges.items()):
            return None
        if not _apart([*self.ranges.values(), *fresh.values()], self.ledger.capacity, self.page):
            return None
        return replace(self, ledger=ledger.commit(digest, pieces), ranges={**self.ranges, **fresh})

    def _with_fewer(self, digest: Digest, wanted: list[Piece], chosen: list[Digest], made: "HostArena") -> Settled:
        for candidate in reversed(chosen):
            fewer = [each for each in chosen if each != candidate]
            if (smaller := self._without(digest, wanted, fewer)) is not None:
                chosen, made = fewer, smaller
        return Settled(made, tuple(chosen))

    def _without(self, digest: Digest, wanted: list[Piece], leaving: Sequence[Digest]) -> "HostArena | None":
        ledger = self.ledger.reserve(digest, wanted, leaving)
        if isinstance(ledger, NoRoom):
            return None
        ranges = dict(_kept(self.ranges, ledger))
        for piece in sorted({piece for piece in wanted if piece.key not in ranges}, key=lambda piece: -piece.size):
            gap = _best_gap(list(ranges.values()), self.ledger.capacity, piece.size)
            if gap is None:
                return None
            ranges[piece.key] = Range(gap, piece.size)
        return replace(self, ledger=ledger, ranges=ranges)


def _kept(ranges: Mapping[str, Range], ledger: ContentLedger) -> dict[str, Range]:
    return {key: where for key, where in ranges.items() if key in ledger.pieces}


def _best_gap(taken: list[Range], capacity: int, size: int) -> int | None:
    """Offset in the smallest gap that is large enough; the first of equals. What has no bytes lies anywhere."""
    if size == 0:
        return 0
    fitting = [(gap.size, gap.offset) for gap in _gaps(taken, capacity) if gap.size >= size]
    return min(fitting)[1] if fitting else None


def _gaps(taken: list[Range], capacity: int) -> Iterator[Range]:
    end = 0
    for where in sorted(taken):
        if where.offset > end:
            yield Range(end, where.offset - end)
        end = max(end, where.offset + where.size)
    if capacity > end or not taken:
        yield Range(end, capacity - end)


def _apart(ranges: list[Range], capacity: int, page: int) -> bool:
    """Whether the ranges are within the arena, at pages, and do not overlap."""
    end = 0
    for where in sorted(ranges):
        if where.offset < end or where.offset % page or where.size % page:
            return False
        end = where.offset + where.size
    return end <= capacity
