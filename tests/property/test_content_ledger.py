"""Invariant 6 for tiers whose versions share files, and the map of the host arena, by random histories."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from roundhouse.vocabulary import Digest
from services.loader.domain.contents import ContentLedger, Piece, choose_content_evictions
from services.loader.domain.host_arena import HostArena, Settled
from services.loader.domain.memory_ledger import NoRoom
from services.loader.domain.room import Leaving, NotEnough

CAPACITY = 100
PIECES = [Piece(f"p{n}", size) for n, size in enumerate((0, 5, 10, 20, 35, 60))]
VERSIONS = st.sampled_from([Digest(f"v{n}") for n in range(5)])
CONTENTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4)


def taken(contents: "dict[Digest, list[Piece]]") -> int:
    """Each piece once, by a plain union."""
    return sum(piece.size for piece in {piece for pieces in contents.values() for piece in pieces})


class Sharing(RuleBasedStateMachine):
    """Versions come, go and fail; `model` is a plain dictionary that should agree."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ContentLedger(CAPACITY)
        self.arena = HostArena(ContentLedger(CAPACITY), page=5)
        self.model: dict[Digest, list[Piece]] = {}
        self.in_arena: dict[Digest, list[Piece]] = {}

    @rule(version=VERSIONS, pieces=CONTENTS, succeeds=st.booleans())
    def stage(self, version: Digest, pieces: list[Piece], succeeds: bool) -> None:
        """Reserve, then commit or fail: a failure leaves everything as it was. All give enough, or nobody leaves."""
        if version in self.model:
            return
        before = self.ledger
        unused = sorted(self.model)
        choice = choose_content_evictions(before, version, pieces, unused)
        wanted = sum(piece.size for piece in set(pieces))
        if isinstance(choice, NotEnough):
            assert wanted > CAPACITY
            return
        assert isinstance(choice, Leaving)
        left = {name: held for name, held in self.model.items() if name not in choice.keys}
        begun = before.reserve(version, pieces, choice.keys)
        assert isinstance(begun, ContentLedger)
        assert begun.resident + begun.reserved == taken({**left, version: pieces}) <= CAPACITY
        for spared in choice.keys:
            fewer = [name for name in choice.keys if name != spared]
            assert isinstance(before.reserve(version, pieces, fewer), NoRoom), "nobody leaves who could stay"
        self.model = left
        self.ledger = begun.commit(version, pieces) if succeeds else begun.release(version)
        if succeeds:
            self.model[version] = pieces

    @rule(version=VERSIONS)
    def drop(self, version: Digest) -> None:
        """Twice is the same as once."""
        self.ledger = self.ledger.release(version).release(version)
        self.model.pop(version, None)

    @rule(version=VERSIONS, pieces=CONTENTS)
    def settle(self, version: Digest, pieces: list[Piece]) -> None:
        """In the arena: whoever is there and stays keeps its place; a version that could be alone there gets in."""
        if version in self.in_arena:
            return
        before = self.arena
        settled = before.settle(version, pieces, sorted(self.in_arena))
        if not isinstance(settled, Settled):
            assert sum(piece.size for piece in set(before.rounded(pieces))) > CAPACITY
            return
        for key, where in settled.arena.ranges.items():
            if key in before.ranges and any(key in {p.key for p in self.in_arena[v]} for v in self.in_arena):
                assert before.ranges[key] == where or key in {piece.key for piece in pieces}
        self.in_arena = {name: held for name, held in self.in_arena.items() if name not in settled.evicted}
        self.in_arena[version] = pieces
        self.arena = settled.arena.commit(version)

    @rule(version=VERSIONS)
    def leave_arena(self, version: Digest) -> None:
        """Its own ranges are free, shared ones stay."""
        self.arena = self.arena.release(version)
        self.in_arena.pop(version, None)

    @invariant()
    def agrees_and_does_not_overlap(self) -> None:
        """Sums as in the dictionary; ranges apart, at pages, within the arena; a new process would take them over."""
        assert self.ledger.resident == taken(self.model)
        assert self.ledger.reserved == 0
        end = 0
        for where in sorted(self.arena.ranges.values()):
            assert where.offset >= end
            assert where.offset % 5 == where.size % 5 == 0
            end = where.offset + where.size
        assert end <= CAPACITY
        successor: HostArena | None = HostArena(ContentLedger(CAPACITY), page=5)
        for version, keys in self.arena.ledger.contents.items():
            assert successor is not None
            successor = successor.adopt(version, {key: self.arena.ranges[key] for key in keys})
        assert successor is not None
        assert successor.ranges == self.arena.ranges


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
