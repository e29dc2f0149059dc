"""What one replica has gathered for its next turn of one pool: endings, submits, and versions that may need a grant.

While a script runs in the store, everything that comes meanwhile waits for the next one, so the busier a replica is,
the more events share a script. Nothing waits for company: an idle replica's turn begins at once.
"""

import asyncio
from dataclasses import dataclass, field

from roundhouse.errors import Unavailable
from services.scheduler.domain.records import (
    Ending,
    Enqueued,
    Finish,
    Offer,
    QueueEntry,
    Room,
    Settled,
    Turn,
    TurnDone,
    VersionKey,
)

EVENTS_MAX = 64  # of each kind in one script: some milliseconds of the store's time


@dataclass(slots=True)
class Gathered:
    """Mutable; owned by the dispatcher. `versions` None = any may need a grant."""

    versions: set[VersionKey] | None = field(default_factory=set)
    endings: list[tuple[Ending, asyncio.Future[Finish]]] = field(default_factory=list)
    entries: list[tuple[QueueEntry, Room, asyncio.Future[Enqueued]]] = field(default_factory=list)

    def note(self, version: VersionKey | None) -> None:
        """A slot or a request of a version (None = of any) may have appeared."""
        if version is None:
            self.versions = None
        elif self.versions is not None:
            self.versions.add(version)

    def rest(self) -> "Gathered | None":
        """Cut down to what fits one script; answers what is left over."""
        if len(self.endings) <= EVENTS_MAX and len(self.entries) <= EVENTS_MAX:
            return None
        left = Gathered(set(), self.endings[EVENTS_MAX:], self.entries[EVENTS_MAX:])
        for entry, _, _ in left.entries:
            left.note(entry.version)
        del self.endings[EVENTS_MAX:], self.entries[EVENTS_MAX:]
        return left

    def turn(self, offers: list[Offer], limit: int) -> Turn:
        """The store's work order."""
        return Turn(
            tuple(ending for ending, _ in self.endings),
            tuple((entry, room) for entry, room, _ in self.entries),
            tuple(offers),
            limit if offers else 0,
        )

    def answer(self, done: TurnDone) -> set[VersionKey]:
        """Tell everybody; answers the versions of freed slots that the turn did not offer."""
        missed: set[VersionKey] = set()
        for (_, ended), finish in zip(self.endings, done.finishes, strict=True):
            if not ended.done():
                ended.set_result(finish)
            if isinstance(finish, Settled) and self.versions is not None and finish.version not in self.versions:
                missed.add(finish.version)
        for (_, _, queued), enqueued in zip(self.entries, done.enqueued, strict=True):
            if not queued.done():
                queued.set_result(enqueued)
        return missed

    def fail(self, error: Unavailable) -> None:
        """It may have happened or not; repeating it is safe."""
        for _, ended in self.endings:
            if not ended.done():
                ended.set_exception(error)
        for _, _, queued in self.entries:
            if not queued.done():
                queued.set_exception(error)
