"""`History` in memory. Shared by the scheduler replicas of one test, as Redis is by real ones."""

from collections import defaultdict

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import PoolName
from services.scheduler.domain.warmth.history import Entry


class InMemoryHistory:
    """All pools of one test. `away` makes every call fail."""

    def __init__(self) -> None:
        self.entries: dict[PoolName, list[Entry]] = defaultdict(list)
        self.away = False

    async def append(self, pool: PoolName, entry: Entry) -> None:
        if self.away:
            raise Unavailable("the history is away")
        self.entries[pool].append(entry)

    async def after(self, pool: PoolName, cursor: str) -> tuple[tuple[Entry, ...], str]:
        if self.away:
            raise Unavailable("the history is away")
        start = int(cursor or 0)
        found = tuple(self.entries[pool][start:])
        return found, str(start + len(found)) if found else cursor
