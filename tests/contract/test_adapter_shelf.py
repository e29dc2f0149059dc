"""What `AdapterShelf` promises, of the real folder and of the fake."""

import asyncio
from pathlib import Path

import pytest

from roundhouse.vocabulary import Digest
from services.loader.adapter_ports import AdapterShelf
from services.loader.adapters.adapter_shelf import MemoryShelf
from tests.fakes.adapter_shelf import FakeShelf

ONE, TWO = Digest(f"sha256:{'1' * 64}"), Digest(f"sha256:{'2' * 64}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An adapter of 10 bytes in two files."""
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"1234")
    (folder / "sub" / "b").write_bytes(b"567890")
    return folder


@pytest.fixture(params=["folder", "fake"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterShelf:
    """Each implementation."""
    return MemoryShelf(tmp_path / "shelf") if request.param == "folder" else FakeShelf()


def test_what_is_put_is_found_by_the_next_process(shelf: AdapterShelf, source: Path) -> None:
    """Twice is the same as once; what is removed is gone, and removing it again does nothing."""

    async def work() -> None:
        assert await shelf.start() == {}
        for digest in (ONE, TWO, ONE):
            await shelf.put(digest, source)
        assert await shelf.start() == {ONE: 10, TWO: 10}
        await shelf.remove(ONE)
        await shelf.remove(ONE)
        assert await shelf.start() == {TWO: 10}
        assert shelf.path(ONE) != shelf.path(TWO)

    asyncio.run(work())


def test_half_copies_of_a_killed_process_go(tmp_path: Path, source: Path) -> None:
    """What has no final name is deleted at start; the folder's copy is the source's, file by file."""
    folder = tmp_path / "shelf"
    shelf = MemoryShelf(folder)

    async def work() -> None:
        await shelf.start()
        await shelf.put(ONE, source)
        (folder / "new-123").mkdir()
        (folder / "new-123" / "a").write_bytes(b"12")
        assert await MemoryShelf(folder).start() == {ONE: 10}

    asyncio.run(work())
    assert [entry.name for entry in folder.iterdir()] == ["1" * 64]
    assert (shelf.path(ONE) / "sub" / "b").read_bytes() == b"567890"
