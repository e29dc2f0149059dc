"""The loader's shelf of adapters in a dictionary. Passes tests/contract/test_adapter_shelf.py as the real one does."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Digest


@dataclass(slots=True)
class FakeShelf:
    """`AdapterShelf` in a dictionary: digest → bytes."""

    held: dict[Digest, int] = field(default_factory=dict)
    puts: list[Digest] = field(default_factory=list)
    size: int = 10
    full: bool = False
    turns: int = 1  # of the event loop that a copy takes

    async def start(self) -> Mapping[Digest, int]:
        """See `AdapterShelf.start`."""
        return dict(self.held)

    def path(self, digest: Digest) -> Path:
        """See `AdapterShelf.path`."""
        return Path("/shelf") / digest

    async def put(self, digest: Digest, source: Path) -> None:
        """See `AdapterShelf.put`."""
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.full:
            raise Unavailable("no memory is left")
        if digest not in self.held:
            self.puts.append(digest)
        self.held[digest] = self.size

    async def remove(self, digest: Digest) -> None:
        """See `AdapterShelf.remove`."""
        await asyncio.sleep(0)
        self.held.pop(digest, None)
