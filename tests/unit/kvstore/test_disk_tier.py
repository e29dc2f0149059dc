"""The disk tier over real files: what earned its place comes back after a restart, and every fault is a miss."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.kvstore.adapters.segment_header import span_of
from services.kvstore.domain.records import Acquired
from services.kvstore.operations.disk_tier import REST_MS
from services.kvstore.operations.fetch_blocks import Wanted
from services.kvstore.ports import DiskFault
from tests.builders.disk_node import LENGTH, SEGMENT, Node, content
from tests.builders.kv_blocks import HOLDER, OTHER_SALT, SALT, chain


@pytest.fixture(params=[b"", b"k" * 32], ids=["plain", "sealed"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:  # type: ignore[misc]
    """A started node, with and without encryption."""
    with closing(await Node(tmp_path / "data", cluster_key=request.param).start()) as started:
        yield started


@pytest.fixture
async def sealed(tmp_path: Path) -> Iterator[Node]:  # type: ignore[misc]
    """A started node that encrypts."""
    with closing(await Node(tmp_path / "data", cluster_key=b"k" * 32).start()) as started:
        yield started


async def test_a_used_chain_is_there_after_a_restart(node: Node) -> None:
    """3 blocks were stored and used once: written, and read back by a process with an empty arena."""
    await node.store_and_use(chain("a", 3))
    assert node.disk.counts().written == 3
    await node.start()
    assert await node.found(chain("a", 3)) == 3
    assert node.disk.counts().promoted == 3


async def test_what_was_never_used_is_not_written(node: Node) -> None:
    """A scan of 4 blocks costs the disk nothing."""
    await node.store(chain("a", 4))
    await node.disk.write_turn()
    assert node.disk.counts().written == 0


async def test_a_handed_over_prompt_is_written_once_another_request_has_used_it(node: Node) -> None:
    """Who has the blocks brought here, and reads them, is one user: the decoding node's disk and core are spared."""
    keys = chain("a", 3)
    await node.store(keys)
    claimed = await node.service.acquire_waiting(Wanted(SALT, tuple(keys), hold="request-1/1"), HOLDER, 0)
    assert isinstance(claimed, Acquired)
    await node.disk.write_turn()
    assert node.disk.counts().written == 0
    node.clock.advance(2_000)
    again = await node.service.acquire_waiting(Wanted(SALT, tuple(keys[:2]), hold="request-2/1"), HOLDER, 0)
    assert isinstance(again, Acquired)
    await node.disk.write_turn()
    assert node.disk.counts().written == 2


async def test_a_session_that_goes_on_has_earned_its_new_blocks(node: Node) -> None:
    """The first 2 blocks were used; the third continues them, so it is written though nobody used it yet."""
    keys = chain("a", 3)
    await node.store_and_use(keys[:2])
    await node.store(keys[2:], parent=keys[1])
    await node.disk.write_turn()
    assert node.disk.counts().written == 3


async def test_without_time_to_wait_the_disk_is_a_miss(node: Node) -> None:
    """wait_ms 0 asks memory only."""
    await node.store_and_use(chain("a", 1))
    await node.start()
    wanted = Wanted(SALT, tuple(chain("a", 1)))
    assert not isinstance(await node.service.acquire_waiting(wanted, HOLDER, 0), Acquired)


async def test_another_salt_finds_nothing_on_disk(node: Node) -> None:
    """Invariant 11: the salt is compared, though the caller has the right keys."""
    await node.store_and_use(chain("a", 2))
    await node.start()
    assert await node.found(chain("a", 2), OTHER_SALT) == 0


async def test_an_erased_salt_is_gone_from_memory_disk_and_files(node: Node) -> None:
    """Neither index nor files nor arena hold a trace, the other tenant keeps its blocks, also over a restart."""
    await node.store_and_use(chain("a", 2))
    await node.store_and_use(chain("b", 2), OTHER_SALT)
    erased = await node.service.erase_salt(SALT)
    assert (erased.blocks, erased.blocks_left) == (2 + 2, 0)
    assert node.service.usage(SALT) == (0, 0, 0, 0)
    with node.arena.view(0, node.arena.nbytes) as view:
        memory = bytes(view)
    for key in chain("a", 2):
        assert content(key) not in memory
        assert content(key) not in node.file_bytes()
        assert key not in node.file_bytes()
    await node.start()
    assert await node.found(chain("a", 2)) == 0
    assert await node.found(chain("b", 2), OTHER_SALT) == 2


async def test_nothing_of_a_tenant_lies_in_the_clear(sealed: Node) -> None:
    """Neither content, nor block keys, nor the salt, which lets its holder read blocks, nor the model."""
    await sealed.store_and_use(chain("a", 2))
    on_disk = sealed.file_bytes() + b"".join(path.read_bytes() for path in (sealed.folder / "keys").iterdir())
    assert sealed.disk.counts().written == 2
    for secret in (content(b"a/0")[:32], b"a/1", SALT, b"sha256:model"):
        assert secret not in on_disk


async def test_who_destroys_a_key_forgets_the_tenant_in_every_copy(sealed: Node) -> None:
    """The segments were copied before the erasure and are put back afterwards: the tenant's blocks cannot be read any
    more, the other tenant's can."""
    await sealed.store_and_use(chain("a", 2))
    await sealed.store_and_use(chain("b", 2), OTHER_SALT)
    copies = {path: path.read_bytes() for path in sealed.folder.glob("*.segment")}
    assert len(list((sealed.folder / "keys").iterdir())) == 2
    await sealed.service.erase_salt(SALT)
    assert len(list((sealed.folder / "keys").iterdir())) == 1
    for path, data in copies.items():
        path.write_bytes(data)
    await sealed.start()
    assert await sealed.found(chain("a", 2)) == 0
    sealed.clock.advance(REST_MS)
    assert await sealed.found(chain("b", 2), OTHER_SALT) == 2


async def test_another_clusters_key_reads_an_empty_folder(tmp_path: Path) -> None:
    """The same folder with another key, and with none: nothing is found, nothing is served, new blocks are written."""
    for cluster_key in (b"a" * 32, b"b" * 32, b""):
        with closing(await Node(tmp_path / "data", cluster_key=cluster_key).start()) as node:
            assert await node.found(chain("a", 2)) == 0
            await node.store_and_use(chain("a", 2))
            assert node.disk.counts().written == 2


async def test_what_is_on_disk_is_told_as_here(node: Node) -> None:
    """Dropped from memory, a block that lies on disk is no news; gone from there too, it is."""
    keys = chain("a", 2)
    await node.store_and_use(keys)
    assert set(node.service.take_changes().stored) == set(keys)
    for number in range(4):
        await node.store(chain(f"flood{number}", 2))
    assert node.table.run_length(SALT, keys) == 0
    assert not set(keys) & set(node.service.take_changes().dropped)
    assert set(keys) <= set(node.service.stored_keys())
    await node.service.erase_salt(SALT)
    assert set(keys) <= set(node.service.take_changes().dropped)
    assert node.service.stored_keys() == []


async def test_a_torn_tail_is_cut_and_written_over(node: Node) -> None:
    """The last of 3 blocks was cut in half: 2 come back, and the next block takes its place."""
    await node.store_and_use(chain("a", 3))
    path = max(node.folder.glob("*.segment"))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - LENGTH)
    await node.start()
    assert await node.found(chain("a", 3)) == 2
    await node.store_and_use(chain("b", 1))
    await node.start()
    assert await node.found(chain("b", 1)) == 1


async def test_a_corrupt_block_is_a_miss_and_dropped_with_what_is_below(node: Node) -> None:
    """A bit of the second block fell over: 1 block is found, 1 counted, and neither it nor the third stays."""
    await node.store_and_use(chain("a", 3))
    path = max(node.folder.glob("*.segment"))
    with path.open("r+b") as file:
        file.seek(span_of(LENGTH) + 4096 + 17)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    await node.start()
    assert await node.found(chain("a", 3)) == 1
    assert (node.disk.counts().corrupt, node.disk.counts().blocks) == (1, 1)


async def test_a_full_disk_leaves_requests_unharmed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, one error is counted, and a second later it is tried again."""
    assert node.files is not None

    def full(*_: object) -> None:
        raise DiskFault("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(node.files, "append", full)
        await node.store_and_use(chain("a", 2))
    assert (node.disk.counts().errors, node.disk.counts().written) == (1, 0)
    node.clock.advance(REST_MS)
    assert await node.found(chain("a", 2)) == 2
    await node.disk.write_turn()
    assert node.disk.counts().written == 2


async def test_an_unreadable_disk_is_a_miss(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gets nothing, no slot stays held, and the block is dropped."""
    await node.store_and_use(chain("a", 2))
    await node.start()
    assert node.files is not None

    def broken(*_: object) -> None:
        raise DiskFault("input/output error")

    monkeypatch.setattr(node.files, "read_into", broken)
    assert await node.found(chain("a", 2)) == 0
    assert node.service.statistics().units_held == 0
    assert node.disk.counts().blocks == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
async def test_what_the_kernel_says_is_a_miss(node: Node, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """2 blocks lie on disk, 2 are to be written. Every write fails, and then every read: the memory's blocks are found,
    the disk's are a miss, both are counted, and once the disk is well again blocks are written and read as before."""
    await node.store_and_use(chain("a", 2))
    await node.start()

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", refuse)
        await node.store_and_use(chain("b", 2))
        assert (node.disk.counts().errors, node.disk.counts().written) == (1, 0)
        assert await node.found(chain("b", 2)) == 2
        patched.setattr(os, "preadv", refuse)
        node.clock.advance(REST_MS)
        assert await node.found(chain("a", 2)) == 0
        assert node.disk.counts().errors >= 2
    node.clock.advance(REST_MS)
    await node.store_and_use(chain("c", 2))
    await node.start()
    assert await node.found(chain("c", 2)) == 2


async def test_the_disk_keeps_its_bound_and_what_is_used(tmp_path: Path) -> None:
    """4 segments of 4 blocks, 24 chains of 2: never more than 16 records, and the chain that is used again stays."""
    with closing(await Node(tmp_path / "data", 4 * SEGMENT).start()) as node:
        await node.store_and_use(chain("kept", 2))
        for number in range(24):
            await node.store_and_use(chain(f"other{number}", 2))
            assert await node.found(chain("kept", 2)) == 2
            assert node.disk.counts().bytes_held <= 4 * SEGMENT
        assert node.disk.counts().dropped > 0
        await node.start()
        assert await node.found(chain("kept", 2)) == 2


async def test_a_salt_has_a_bound_of_its_own(tmp_path: Path) -> None:
    """Room for 2 records a salt: the third is refused, another salt is not."""
    with closing(await Node(tmp_path / "data", salt_bytes_max=2 * span_of(LENGTH)).start()) as node:
        await node.store_and_use(chain("a", 3))
        await node.store_and_use(chain("b", 2), OTHER_SALT)
        assert (node.disk.usage(SALT)[0], node.disk.usage(OTHER_SALT)[0]) == (2, 2)
        assert node.disk.counts().refused == 1


@pytest.mark.parametrize("cluster_key", [b"", b"k" * 32], ids=["plain", "sealed"])
async def test_any_flipped_cut_or_missing_bytes_give_right_blocks_or_none(tmp_path: Path, cluster_key: bytes) -> None:
    """Fuzz, 60 seeds: whatever happens to the files, a reader gets a prefix of the right bytes (`found` compares)."""
    with closing(Node(tmp_path / "data", cluster_key=cluster_key)) as node:
        for seed in range(60):
            chance = random.Random(seed)
            for path in node.folder.glob("*.segment"):
                path.unlink()
            await node.start()
            await node.store_and_use(chain("a", 3))
            await node.store_and_use(chain("b", 2), OTHER_SALT)
            _damage(node.folder, chance)
            await node.start()
            await node.found(chain("a", 3))
            await node.found(chain("b", 2), OTHER_SALT)
            assert await node.found(chain("a", 3), OTHER_SALT) == 0
            counts = node.service.statistics()
            assert counts.units_free + counts.units_held == counts.units_total


def _damage(folder: Path, chance: random.Random) -> None:
    """Flip a byte, cut a file, blank a page, swap two pages, or remove a file."""
    path = chance.choice(sorted(folder.glob("*.segment")))
    data = bytearray(path.read_bytes())
    kind, at = chance.randrange(5), chance.randrange(len(data))
    page, other = at // 4096 * 4096, chance.randrange(len(data)) // 4096 * 4096
    if kind == 0:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[page : page + 4096] = bytes(4096)
    elif kind == 3:
        data[page : page + 4096], data[other : other + 4096] = data[other : other + 4096], data[page : page + 4096]
    if kind == 4:
        path.unlink()
    else:
        path.write_bytes(data)
