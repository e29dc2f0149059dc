"""What only the real arena has: shared memory that engines map, its index, and what a killed process leaves."""

import asyncio
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.reference.mapped_weights import parse_mapped_files, read_mapped
from engines.reference.model_config import CheckpointError
from roundhouse.errors import NotFound, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.direct_io import CHUNK_BYTES, DIRECT_FROM_BYTES
from services.loader.adapters.shared_arena import PAGE_BYTES, SharedArena
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic
from services.loader.ports import Filling, HostVersion

D = Digest("sha256:" + "d" * 64)
SIZES = [1, CHUNK_BYTES - 1, CHUNK_BYTES + 4097, DIRECT_FROM_BYTES + 5]
PAGES = [-(-size // PAGE_BYTES) for size in SIZES]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[SharedArena]:
    """Room for all of SIZES, not started."""
    made = SharedArena(tmp_path / "arena", sum(PAGES) * PAGE_BYTES + 5)
    yield made
    made.close()


async def fill(arena: SharedArena, *files: Filling) -> None:
    """Read files with an open lane."""
    with Traffic().lane(Priority.DEMAND) as lane:
        await arena.fill(files, lane, lambda _: None)


async def test_an_engine_maps_what_was_filled(arena: SharedArena, tmp_path: Path) -> None:
    """Files around the size of a chunk, small ones buffered and the large one past the page cache, all whole."""
    await arena.start()
    files, offset = [], 0
    for number, (size, pages) in enumerate(zip(SIZES, PAGES, strict=True)):
        path = tmp_path / str(number)
        path.write_bytes(os.urandom(size))
        files.append(Filling(path, size, offset))
        offset += pages * PAGE_BYTES
    await fill(arena, *files)
    with arena.path.open("rb") as opened:
        for file in files:
            with mmap.mmap(opened.fileno(), file.size, prot=mmap.PROT_READ, offset=file.offset) as memory:
                assert memory[:] == file.path.read_bytes()


async def test_the_next_process_takes_over_only_what_fits(arena: SharedArena, tmp_path: Path) -> None:
    """Same size: what the index names is there; another size, or a torn index: a new file, and old maps stay good."""
    await arena.start()
    (tmp_path / "a").write_bytes(b"weights")
    await fill(arena, Filling(tmp_path / "a", 7, 0))
    await arena.record([HostVersion(D, {"key": (0, PAGE_BYTES)})])
    arena.close()
    same = SharedArena(arena.path, arena.capacity)
    assert await same.start() == [HostVersion(D, {"key": (0, PAGE_BYTES)})]
    with arena.path.open("rb") as opened, mmap.mmap(opened.fileno(), 7, prot=mmap.PROT_READ) as held:
        same.close()
        other = SharedArena(arena.path, 2 * PAGE_BYTES)
        assert await other.start() == []
        await fill(other, Filling(tmp_path / "a", 7, 0))
        assert held[:] == b"weights"
        assert os.fstat(opened.fileno()).st_nlink == 0
    other.close()
    arena.path.with_name("arena.index").write_bytes(b"{torn")
    torn = SharedArena(arena.path, 2 * PAGE_BYTES)
    assert await torn.start() == []
    torn.close()


async def test_two_loaders_cannot_share_it(arena: SharedArena) -> None:
    """The second one is told so instead of writing over what the first has."""
    await arena.start()
    with pytest.raises(Unavailable):
        await SharedArena(arena.path, arena.capacity).start()


async def test_a_cut_file_is_told_and_no_capacity_is_no_arena(arena: SharedArena, tmp_path: Path) -> None:
    """A file with fewer bytes than it was verified with is not taken for whole."""
    await arena.start()
    (tmp_path / "a").write_bytes(b"1")
    with pytest.raises(NotFound):
        await fill(arena, Filling(tmp_path / "a", 7, 0))
    with pytest.raises(NotFound):
        await fill(arena, Filling(tmp_path / "nowhere", 7, 0))
    none = SharedArena(tmp_path / "none", 0)
    assert await none.start() == []
    assert not none.path.exists()


async def test_a_cancelled_filling_has_ended_when_it_says_so(arena: SharedArena, tmp_path: Path) -> None:
    """Nothing writes to the range any more: it may be given to somebody else."""
    await arena.start()
    (tmp_path / "a").write_bytes(bytes(4 * CHUNK_BYTES))
    traffic = Traffic()
    with traffic.lane(Priority.DEMAND), traffic.lane(Priority.BACKGROUND) as lane:
        filling = asyncio.create_task(arena.fill([Filling(tmp_path / "a", 4 * CHUNK_BYTES, 0)], lane, lambda _: None))
        await asyncio.sleep(0.05)
        assert not filling.done()
        lane.leave()
        filling.cancel()
        with pytest.raises((asyncio.CancelledError, Unavailable)):
            await filling


async def test_every_page_can_be_touched_before(arena: SharedArena) -> None:
    """After that the file has all its blocks, so no load waits for a first touch."""
    await arena.start()
    before = os.stat(arena.path).st_blocks
    await arena.fault_in()
    assert os.stat(arena.path).st_blocks >= before


def safetensors_bytes(tensors: dict[str, tuple[str, NDArray[Any]]]) -> bytes:
    """A file of the format: name → (type, array)."""
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        where = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": where}
        data += array.tobytes()
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def test_mapped_tensors_are_those_of_the_file_and_no_copies(tmp_path: Path) -> None:
    """float32 is a read-only view of the map; float16 and bfloat16 are widened exactly."""
    whole = np.arange(6, dtype=np.float32).reshape(2, 3)
    half = np.array([0.5, -2.0], dtype=np.float16)
    brain = np.array([0x3F80, 0xC000], dtype=np.uint16)  # 1.0 and -2.0
    data = safetensors_bytes({"w": ("F32", whole), "h": ("F16", half), "b": ("BF16", brain)})
    offset = mmap.ALLOCATIONGRANULARITY
    (tmp_path / "arena").write_bytes(bytes(offset) + data)
    text = f'{{"path": "{tmp_path / "arena"}", "files": {{"m.safetensors": [{offset}, {len(data)}]}}}}'
    tensors = read_mapped(parse_mapped_files(text), "m.safetensors")
    assert tensors["w"].tolist() == whole.tolist()
    assert tensors["h"].tolist() == [0.5, -2.0]
    assert tensors["b"].tolist() == [1.0, -2.0]
    assert not tensors["w"].flags.owndata
    assert not tensors["w"].flags.writeable


def test_an_arena_that_is_not_seen_here_is_as_none(tmp_path: Path) -> None:
    """Another container without the folder: the engine reads the checkpoint's files."""
    assert parse_mapped_files(f'{{"path": "{tmp_path / "nowhere"}", "files": {{"m": [0, 8]}}}}').files == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"path": "x"}', '{"path": "x", "files": {"a": 1}}'])
def test_a_bad_parameter_is_refused(text: str) -> None:
    """The load fails with its cause."""
    with pytest.raises(CheckpointError):
        parse_mapped_files(text)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}" + b" " * 5,
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}',
        b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"w": 5}',
        b'{"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}',
    ],
)
def test_a_bad_file_is_refused_and_reads_nothing_outside(tmp_path: Path, header: bytes) -> None:
    """Offsets outside the file, shapes that do not fit, unknown types."""
    data = (len(header) if header else 2**40).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "arena").write_bytes(data)
    mapped = parse_mapped_files(f'{{"path": "{tmp_path / "arena"}", "files": {{"m": [0, {len(data)}]}}}}')
    if header.startswith(b"{}"):
        assert read_mapped(mapped, "m") == {}
        return
    with pytest.raises(CheckpointError):
        read_mapped(mapped, "m")
