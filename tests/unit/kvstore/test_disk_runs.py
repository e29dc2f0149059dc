"""Chains that go to the disk in runs and come back in chunks, each begun before the one ahead of it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.kvstore.domain.disk_index import DiskRecord
from services.kvstore.operations import disk_tier
from tests.builders.disk_node import Node, content
from tests.builders.kv_blocks import SALT, chain


@pytest.fixture(params=[b"", b"k" * 32], ids=["plain", "sealed"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:  # type: ignore[misc]
    """A started node, with and without encryption."""
    with closing(await Node(tmp_path / "data", cluster_key=request.param).start()) as started:
        yield started


@pytest.mark.parametrize("blocks", [1, 2, 5, 8])
async def test_a_long_chain_goes_out_in_runs_and_comes_back_in_chunks(
    node: Node, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """2 blocks under one lease on the way out, 2 at a time on the way back: all of it, and no slot stays held."""
    monkeypatch.setattr(disk_tier, "RUN_BLOCKS_MAX", 2)
    monkeypatch.setattr(disk_tier, "CHUNK_BLOCKS", 2)
    await node.store_and_use(chain("a", blocks))
    assert node.disk.counts().written == blocks
    await node.start()
    assert await node.found(chain("a", blocks)) == blocks
    assert node.service.statistics().units_leased == 0


@pytest.mark.parametrize("wrong", [0, 1, 2, 3, 4])
async def test_what_is_read_ahead_of_a_wrong_block_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Chunks of 2; the next is being read when one turns out to be wrong: what is above it is found, one is counted,
    though what is below is overwritten on the disk, and no slot of that stays held."""
    monkeypatch.setattr(disk_tier, "CHUNK_BLOCKS", 2)
    await node.store_and_use(chain("a", 6))
    await node.start()
    assert node.files is not None
    read_into = node.files.read_into

    def read(record: DiskRecord, into: memoryview) -> None:
        read_into(record, into)
        if record.key == chain("a", 6)[wrong]:
            into[7] ^= 1

    monkeypatch.setattr(node.files, "read_into", read)
    assert await node.found(chain("a", 6)) == wrong
    assert node.disk.counts().corrupt == 1
    counts = node.service.statistics()
    assert (counts.units_leased, counts.units_held) == (0, wrong)


async def test_what_is_erased_in_the_middle_of_a_run_is_not_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of 3 blocks is being written when the tenant goes: no block is on the disk afterwards, and
    no slot stays held."""
    keys = chain("a", 3)
    await node.store(keys)
    assert await node.found(keys) == 3
    assert node.files is not None
    append = node.files.append

    def erased_meanwhile(record: DiskRecord, data: memoryview) -> DiskRecord:
        node.table.erase_salt(SALT, node.clock.monotonic_ms())
        return append(record, data)

    with monkeypatch.context() as patched:
        patched.setattr(node.files, "append", erased_meanwhile)
        await node.disk.write_turn()
    counts = node.disk.counts()
    assert (counts.written, counts.blocks, counts.errors) == (0, 0, 0)
    assert all(content(key)[:64] not in node.file_bytes() for key in keys)
    await node.service.expire_leases()  # which overwrites what was erased
    assert node.service.statistics().units_held == 0
