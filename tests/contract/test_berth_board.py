"""What `BerthBoard` promises, of the real links and of the fake."""

import asyncio
from pathlib import Path

import pytest

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapter_ports import BerthBoard
from services.loader.adapters.berth_links import BerthLinks
from tests.fakes.berth_board import FakeBoard

ONE, TWO = Digest(f"sha256:{'1' * 64}"), Digest(f"sha256:{'2' * 64}")
SHELF, DISK = Path("/shelf") / ("1" * 64), Path("/disk/weights") / ("1" * 64) / "content"


@pytest.fixture(params=["links", "fake"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> BerthBoard:
    """Each implementation."""
    return BerthLinks(tmp_path / "berths") if request.param == "links" else FakeBoard()


def test_what_is_given_out_is_found_by_the_next_process(board: BerthBoard) -> None:
    """Numbers by digest, of the load that stands; each load has its own name and folder; closing twice is once."""

    async def work() -> None:
        assert await board.start() == {}
        early = await board.open("m--1", 8, 16)
        late = await board.open("m--1", 9, 32)
        assert (early.name, early.folder) != (late.name, late.folder)
        for digest in (ONE, TWO, ONE):
            number = late.take(digest)
            assert isinstance(number, int)
            await board.point(late, number, SHELF.with_name(digest.removeprefix("sha256:")))
        found = await board.start()
        assert found == {"m--1": late}
        assert (found["m--1"].taken, found["m--1"].count, found["m--1"].rank_max) == ({ONE: 0, TWO: 1}, 9, 32)
        await board.close("m--1")
        await board.close("m--1")
        assert await board.start() == {}

    asyncio.run(work())


def test_an_engine_finds_what_a_number_leads_to_now(tmp_path: Path) -> None:
    """It moves from host memory to disk and back; a number that nobody has is not there. A link that was being made
    when its process died is cleared away."""
    links = BerthLinks(tmp_path / "berths")

    async def work() -> None:
        await links.start()
        berths = await links.open("m--1", 8, 16)
        folder = Path(berths.folder)
        for target in (SHELF, DISK, DISK, SHELF):
            await links.point(berths, 0, target)
            assert (folder / "0").readlink() == target
        berths.take(ONE)
        (folder / "new-1").symlink_to(DISK)
        (tmp_path / "berths" / "m--1" / "stray").mkdir()
        assert await BerthLinks(tmp_path / "berths").start() == {"m--1": berths}

    asyncio.run(work())
    (folder,) = (tmp_path / "berths" / "m--1").glob("*.8.16")
    assert [entry.name for entry in folder.iterdir()] == ["0"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Unavailable, so that the caller tries another node."""
    (tmp_path / "berths").write_text("no folder")
    links = BerthLinks(tmp_path / "berths")

    async def work() -> None:
        with pytest.raises(Unavailable):
            await links.start()
        with pytest.raises(Unavailable):
            await links.open("m--1", 8, 16)

    asyncio.run(work())
