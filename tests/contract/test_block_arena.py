"""What every arena does, the real one in shared memory and the fake of the tests; and what only the real one has."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roundhouse.errors import Unavailable
from services.kvstore.adapters.shm_arena import shm_arena
from services.kvstore.ports import BlockArena
from tests.fakes.block_arena import FakeArena

NBYTES = 16 * mmap.PAGESIZE


@pytest.fixture(params=["fake", "shm"])
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockArena]:
    """One arena of each kind."""
    if request.param == "fake":
        yield FakeArena(NBYTES)
        return
    with shm_arena(str(tmp_path / "arena"), NBYTES) as real:
        yield real


def test_a_fresh_arena_is_zero(arena: BlockArena) -> None:
    """Nothing of an earlier owner can be read."""
    assert arena.nbytes == NBYTES
    with arena.view(0, NBYTES) as view:
        assert bytes(view) == bytes(NBYTES)


def test_what_is_written_through_one_view_is_seen_through_another(arena: BlockArena) -> None:
    """Views are the memory itself, not copies."""
    with arena.view(100, 5) as view:
        view[:] = b"block"
    with arena.view(98, 9) as view:
        assert bytes(view) == b"\0\0block\0\0"


def test_the_last_byte_is_in_the_arena(arena: BlockArena) -> None:
    """A view may end exactly at the end; an empty view is fine."""
    with arena.view(NBYTES - 1, 1) as view:
        assert len(view) == 1
    with arena.view(NBYTES, 0) as view:
        assert len(view) == 0


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (NBYTES, 1), (NBYTES - 1, 2), (0, NBYTES + 1)])
def test_what_lies_outside_is_refused(arena: BlockArena, offset: int, length: int) -> None:
    """A wrong offset is an error, never other memory."""
    with pytest.raises(ValueError, match="not within an arena"):
        arena.view(offset, length)


def test_another_mapping_of_the_file_is_the_same_memory(tmp_path: Path) -> None:
    """This is how engines see it."""
    path = tmp_path / "arena"
    with shm_arena(str(path), NBYTES) as arena, _mapped(path) as theirs:
        theirs[4096:4101] = b"block"
        with arena.view(4096, 5) as view:
            assert bytes(view) == b"block"


def test_the_file_is_gone_after_a_clean_end(tmp_path: Path) -> None:
    """Nothing stays in memory."""
    path = tmp_path / "arena"
    with shm_arena(str(path), NBYTES):
        assert path.stat().st_size == NBYTES
        assert path.stat().st_mode & 0o077 == 0  # other users cannot read prompts' states
    assert not path.exists()


def test_a_leftover_of_a_dead_process_is_replaced_not_reused(tmp_path: Path) -> None:
    """An engine that still writes into the old file cannot harm the new one."""
    path = tmp_path / "arena"
    path.write_bytes(b"x" * NBYTES)
    with _mapped(path) as stale, shm_arena(str(path), NBYTES) as arena:
        stale[0:5] = b"late!"
        with arena.view(0, 5) as view:
            assert bytes(view) == bytes(5)


def test_the_arena_of_a_running_process_is_left_alone(tmp_path: Path) -> None:
    """The lock says that its owner lives."""
    path = tmp_path / "arena"
    path.write_bytes(b"x")
    owner = os.open(path, os.O_RDWR)
    fcntl.flock(owner, fcntl.LOCK_EX)
    try:
        with pytest.raises(Unavailable, match="running kvstore"), shm_arena(str(path), NBYTES):
            pass
        assert path.read_bytes() == b"x"
    finally:
        os.close(owner)


def test_memory_that_is_not_there_is_refused_before_any_is_taken(tmp_path: Path) -> None:
    """A pebibyte, which no address space maps: refused with the reason, and no file is made."""
    with pytest.raises(Unavailable, match="are not there"), shm_arena(str(tmp_path / "arena"), 1 << 50):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_an_error_at_start(tmp_path: Path) -> None:
    """The reason is told, as for every other fault of the start."""
    with pytest.raises(Unavailable, match="No such file"), shm_arena(str(tmp_path / "no" / "arena"), NBYTES):
        pass


def test_an_arena_is_whole_pages(tmp_path: Path) -> None:
    """A size that cannot be mapped whole is refused."""
    with pytest.raises(Unavailable, match="whole pages"), shm_arena(str(tmp_path / "arena"), NBYTES + 1):
        pass


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), NBYTES) as mapped:
        yield mapped
