"""The loader's board of berths in a dictionary. Passes tests/contract/test_berth_board.py as the real one does."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from roundhouse.errors import Unavailable
from services.loader.domain.berths import Berths


@dataclass(slots=True)
class FakeBoard:
    """`BerthBoard` in a dictionary: Triton name -> its berths, and where each of its numbers leads."""

    opened: dict[str, Berths] = field(default_factory=dict)
    leads_to: dict[str, dict[int, Path]] = field(default_factory=dict)
    loads: int = 0
    full: bool = False

    async def start(self) -> Mapping[str, Berths]:
        """See `BerthBoard.start`."""
        return {name: replace(each, taken=dict(each.taken)) for name, each in self.opened.items()}

    async def open(self, triton_name: str, count: int, rank_max: int) -> Berths:
        """See `BerthBoard.open`."""
        await asyncio.sleep(0)
        self.loads += 1
        berths = Berths(f"load{self.loads}", f"/berths/{triton_name}/{self.loads}", count, rank_max)
        self.opened[triton_name], self.leads_to[berths.folder] = berths, {}
        return berths

    async def point(self, berths: Berths, number: int, target: Path) -> None:
        """See `BerthBoard.point`."""
        await asyncio.sleep(0)
        if self.full:
            raise Unavailable("no link can be made")
        self.leads_to[berths.folder][number] = target

    async def close(self, triton_name: str) -> None:
        """See `BerthBoard.close`."""
        await asyncio.sleep(0)
        if (berths := self.opened.pop(triton_name, None)) is not None:
            del self.leads_to[berths.folder]
