"""The account of a cache tier in which versions share files: a file that two fine-tunes have in common counts once.

A *piece* is the content of one file. Each version that is there, or on its way, holds its pieces; a piece whose last
holder leaves is free. Immutable, like `memory_ledger`: a step that fails keeps the old account.
Invariant 6: `resident + reserved ≤ capacity`, asserted at each change.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundhouse.vocabulary import Digest
from services.loader.domain.memory_ledger import Holding, NoRoom
from services.loader.domain.room import Leaving, NotEnough

SPARED_MAX = 64  # a guess: adapters leave by the hundred, and a few too many are soon back


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """One file's content. `key` is its SHA-256, or, before that is known, a name that no other version has."""

    key: str
    size: int  # bytes that it takes of the tier


@dataclass(frozen=True, slots=True)
class _Held:
    size: int
    resident: bool
    holders: frozenset[Digest]


@dataclass(frozen=True, slots=True)
class ContentLedger:
    """Bytes of one tier. Each change is O(pieces)."""

    capacity: int
    pieces: Mapping[str, _Held] = field(default_factory=dict)
    contents: Mapping[Digest, tuple[str, ...]] = field(default_factory=dict)
    resident: int = 0
    reserved: int = 0

    def __post_init__(self) -> None:
        assert self.resident >= 0
        assert self.reserved >= 0
        assert self.resident + self.reserved <= self.capacity, "invariant 6: more is held than there is"

    @property
    def free(self) -> int:
        """Bytes that anyone may still reserve."""
        return self.capacity - self.resident - self.reserved

    def held_by(self, digest: Digest) -> Holding:
        """What a version has here, shared pieces included."""
        held = [self.pieces[key] for key in self.contents.get(digest, ())]
        resident = sum(each.size for each in held if each.resident)
        return Holding(reserved=sum(each.size for each in held) - resident, resident=resident)

    def is_whole(self, digest: Digest) -> bool:
        """Whether every piece of the version is there."""
        return digest in self.contents and all(self.pieces[key].resident for key in self.contents[digest])

    def missing(self, pieces: Iterable[Piece]) -> int:
        """Bytes of the pieces that are neither there nor promised to anybody."""
        return sum(each.size for each in {piece.key: piece for piece in pieces}.values() if each.key not in self.pieces)

    def reserve(
        self, digest: Digest, pieces: Sequence[Piece], leaving: Iterable[Digest] = ()
    ) -> "ContentLedger | NoRoom":
        """Let `leaving` go and promise the version its pieces, in one step: what both have in common stays.

        A version that has some already keeps what is the same. Beside one copy, O(what changes)."""
        draft = _Draft(self)
        draft.hold(digest, pieces)
        for other in leaving:
            if other != digest:
                draft.drop(other)
        return draft.settle(self.capacity)

    def commit(self, digest: Digest, pieces: Sequence[Piece]) -> "ContentLedger":
        """The version is there, and this is what it consists of: not more than was reserved. Idempotent."""
        draft = _Draft(self)
        draft.hold(digest, pieces)
        for piece in pieces:
            draft.arrive(piece)
        made = draft.settle(self.capacity)
        assert isinstance(made, ContentLedger), "what came is not larger than what was reserved"
        return made

    def release(self, *digests: Digest) -> "ContentLedger":
        """These versions are not here any more, nor on their way. Idempotent."""
        draft = _Draft(self)
        for digest in digests:
            draft.drop(digest)
        made = draft.settle(self.capacity)
        assert isinstance(made, ContentLedger), "nothing grows by leaving"
        return made


def choose_content_evictions(
    ledger: ContentLedger, digest: Digest, pieces: Sequence[Piece], unused: Sequence[Digest]
) -> Leaving[Digest] | NotEnough:
    """Choose from `unused`, in its order, only as many versions as make room for `pieces`.

    Beside one copy of the account for each of the last `SPARED_MAX` chosen, O(pieces of the chosen)."""
    offered = iter(each for each in unused if each in ledger.contents and each != digest)
    draft, chosen = _Draft(ledger), list[Digest]()
    draft.hold(digest, pieces)
    while (missing := draft.resident + draft.reserved - ledger.capacity) > 0:
        leaving = next(offered, None)
        if leaving is None:
            return NotEnough(missing)
        draft.drop(leaving)
        chosen.append(leaving)
    return Leaving(_without_needless(ledger, digest, pieces, chosen))


def _without_needless(
    ledger: ContentLedger, digest: Digest, pieces: Sequence[Piece], chosen: list[Digest]
) -> tuple[Digest, ...]:
    """Later ones first, because the order says who should rather go. Of very many only the last few are looked at."""
    for candidate in chosen[: -SPARED_MAX - 1 : -1]:
        fewer = [each for each in chosen if each != candidate]
        if isinstance(ledger.reserve(digest, pieces, fewer), ContentLedger):
            chosen = fewer
    return tuple(chosen)


class _Draft:
    """An account while it is changed."""

    def __init__(self, ledger: ContentLedger) -> None:
        self.pieces = dict(ledger.pieces)
        self.contents = dict(ledger.contents)
        self.resident = ledger.resident
        self.reserved = ledger.reserved

    def hold(self, digest: Digest, pieces: Sequence[Piece]) -> None:
        """The version holds these, and nothing else any more."""
        before, wanted = self.contents.get(digest, ()), {piece.key: piece.size for piece in pieces}
        for key, size in wanted.items():
            known = self.pieces.get(key)
            if known is None:
                self.reserved += size
                known = _Held(size, False, frozenset())
            self.pieces[key] = replace(known, holders=known.holders | {digest})
        self.contents[digest] = tuple(wanted)
        self._let_go(digest, [key for key in before if key not in wanted])

    def drop(self, digest: Digest) -> None:
        """The version holds nothing. Idempotent."""
        self._let_go(digest, self.contents.pop(digest, ()))

    def arrive(self, piece: Piece) -> None:
        """A piece that somebody holds is there now, with the size that it has now."""
        known = self.pieces[piece.key]
        self._count(known, -1)
        self.pieces[piece.key] = replace(known, size=piece.size, resident=True)
        self._count(self.pieces[piece.key], 1)

    def settle(self, capacity: int) -> ContentLedger | NoRoom:
        """The account as it is now, if it is within the capacity."""
        over = self.resident + self.reserved - capacity
        if over > 0:
            return NoRoom(missing=over)
        return ContentLedger(capacity, self.pieces, self.contents, self.resident, self.reserved)

    def _let_go(self, digest: Digest, keys: Iterable[str]) -> None:
        for key in keys:
            known = self.pieces[key]
            if len(known.holders) > 1:
                self.pieces[key] = replace(known, holders=known.holders - {digest})
            else:
                self._count(known, -1)
                del self.pieces[key]

    def _count(self, held: _Held, times: int) -> None:
        if held.resident:
            self.resident += times * held.size
        else:
            self.reserved += times * held.size
