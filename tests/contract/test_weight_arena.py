"""The host arena: the fake and the real file answer the same calls in the same way."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundhouse.clock import SystemClock
from roundhouse.vocabulary import Digest
from services.loader.adapters.shared_arena import PAGE_BYTES, SharedArena
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic
from services.loader.ports import Filling, HostVersion, WeightArena
from tests.fakes.weight_arena import FakeWeightArena

D = Digest("sha256:" + "d" * 64)


@pytest.fixture(params=["fake", "real"])
async def arena(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WeightArena]:
    """Both sides, started."""
    real = SharedArena(tmp_path / "arena", 4 * PAGE_BYTES)
    made: WeightArena = FakeWeightArena(SystemClock(), 4 * PAGE_BYTES) if request.param == "fake" else real
    assert await made.start() == []
    yield made
    real.close()


async def test_what_was_filled_is_told_and_recorded(arena: WeightArena, tmp_path: Path) -> None:
    """Both files of 7 bytes are counted on the way; what was recorded last is what the next start finds."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"weights")
    files = [Filling(path, 7, number * arena.page) for number, path in enumerate(paths)]
    reports: list[int] = []
    with Traffic().lane(Priority.DEMAND) as lane:
        await arena.fill(files, lane, reports.append)
    assert all(0 < done <= 14 for done in reports)
    kept = [HostVersion(D, {"key": (0, arena.page)})]
    await arena.record([HostVersion(D, {"old": (0, arena.page)})])
    await arena.record(kept)
    if isinstance(arena, SharedArena):
        arena.close()
    assert await arena.start() == kept


async def test_its_size_is_whole_pages(arena: WeightArena) -> None:
    """Ranges begin at multiples of `page`, so the arena is a multiple too."""
    assert arena.capacity == 4 * PAGE_BYTES
    assert arena.capacity % arena.page == 0
