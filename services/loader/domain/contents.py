"""The account of a cache tier in which versions share files: a file that two fine-tunes have in common counts once.

A *piece* is the content of one file. Each version that is there, or on its way, holds its pieces; a piece whose last
holder leaves is free. Immutable, like `memory_ledger`: a step that fails keeps the old account.
Invariant 6: `resident + reserved ≤ capacity`, asserted at each change.
"""

from bisect import bisect_left
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

        A version that has some already keeps what is the same."""
        kept = {name: keys for name, keys in self.contents.items() if name not in {digest, *leaving}}
        sizes = {key: (held.size, held.resident) for key, held in self.pieces.items()}
        for piece in pieces:
            sizes.setdefault(piece.key, (piece.size, False))
        kept[digest] = tuple(dict.fromkeys(piece.key for piece in pieces))
        return _account(self.capacity, sizes, kept)

    def commit(self, digest: Digest, pieces: Sequence[Piece]) -> "ContentLedger":
        """The version is there, and this is what it consists of: not more than was reserved. Idempotent."""
        sizes = {key: (held.size, held.resident) for key, held in self.pieces.items()}
        sizes.update({piece.key: (piece.size, True) for piece in pieces})
        contents = {**self.contents, digest: tuple(dict.fromkeys(piece.key for piece in pieces))}
        made = _account(self.capacity, sizes, contents)
        assert isinstance(made, ContentLedger), "what came is not larger than what was reserved"
        return made

    def release(self, *digests: Digest) -> "ContentLedger":
        """These versions are not here any more, nor on their way. Idempotent."""
        kept = {name: keys for name, keys in self.contents.items() if name not in digests}
        sizes = {key: (held.size, held.resident) for key, held in self.pieces.items()}
        made = _account(self.capacity, sizes, kept)
        assert isinstance(made, ContentLedger), "nothing grows by leaving"
        return made

    def resized(self, capacity: int) -> "ContentLedger":
        """The same account of a tier of another size."""
        return replace(self, capacity=capacity)


def choose_content_evictions(
    ledger: ContentLedger, digest: Digest, pieces: Sequence[Piece], unused: Sequence[Digest]
) -> Leaving[Digest] | NotEnough:
    """Choose from `unused`, in its order, only as many versions as make room for `pieces`.

    O(pieces × (log unused + chosen))."""
    offered = [each for each in unused if each in ledger.contents and each != digest]
    count = bisect_left(
        range(len(offered) + 1),
        True,
        key=lambda size: isinstance(ledger.reserve(digest, pieces, offered[:size]), ContentLedger),
    )
    if count > len(offered):
        answer = ledger.reserve(digest, pieces, offered)
        assert isinstance(answer, NoRoom)
        return NotEnough(answer.missing)
    return Leaving(_without_needless(ledger, digest, pieces, offered[:count]))


def _without_needless(
    ledger: ContentLedger, digest: Digest, pieces: Sequence[Piece], chosen: list[Digest]
) -> tuple[Digest, ...]:
    """Later ones first, because the order says who should rather go. Of very many only the last few are looked at."""
    for candidate in chosen[: -SPARED_MAX - 1 : -1]:
        fewer = [each for each in chosen if each != candidate]
        if isinstance(ledger.reserve(digest, pieces, fewer), ContentLedger):
            chosen = fewer
    return tuple(chosen)


def _account(
    capacity: int, sizes: Mapping[str, tuple[int, bool]], contents: Mapping[Digest, tuple[str, ...]]
) -> ContentLedger | NoRoom:
    holders: dict[str, set[Digest]] = {}
    for digest, keys in contents.items():
        for key in keys:
            holders.setdefault(key, set()).add(digest)
    pieces = {key: _Held(*sizes[key], frozenset(names)) for key, names in holders.items()}
    resident = sum(held.size for held in pieces.values() if held.resident)
    reserved = sum(held.size for held in pieces.values() if not held.resident)
    if resident + reserved > capacity:
        return NoRoom(missing=resident + reserved - capacity)
    return ContentLedger(capacity, pieces, contents, resident, reserved)
