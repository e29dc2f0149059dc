"""The kvstore's verbs over a fake arena: what is published is what lies there."""

import asyncio

import xxhash

from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import Acquired, Committed, Holder, Missed, Reserved
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations import serve_blocks
from services.kvstore.operations.serve_blocks import BlockService
from tests.builders.kv_blocks import HOLDER, SALT, UNIT, chain, new_blocks
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock


class Node:
    """A service over some slots, and a writer."""

    def __init__(self, units: int = 8) -> None:
        self.arena = FakeArena(units * UNIT)
        self.clock = ManualClock()
        self.service = BlockService(BlockTable(SlotArena(units * UNIT, UNIT, UNIT), "run"), self.arena, self.clock)

    def write(self, keys: list[bytes]) -> tuple[str, dict[bytes, int]]:
        """Reserve and fill slots; the lease and the checksums of what was written."""
        reserved = self.service.reserve(new_blocks(keys), HOLDER)
        assert isinstance(reserved, Reserved)
        claims = {}
        for place in reserved.slots:
            data = place.key.ljust(UNIT, b".")
            with self.arena.view(place.offset, UNIT) as view:
                view[:] = data
            claims[place.key] = xxhash.xxh3_64_intdigest(data)
        return reserved.lease_id, claims

    async def store(self, keys: list[bytes]) -> None:
        """Write and publish."""
        assert (await self.service.commit(*self.write(keys))).committed == len(keys)

    def acquire(self, keys: list[bytes]) -> Acquired:
        """A lease on what must be there."""
        acquired = self.service.acquire(SALT, keys, HOLDER)
        assert isinstance(acquired, Acquired)
        return acquired


async def test_blocks_whose_bytes_match_are_published() -> None:
    """The place and the checksum that a reader gets are those of the bytes written."""
    node, keys = Node(), chain("a", 2)
    await node.store(keys)
    for place in node.acquire(keys).blocks:
        with node.arena.view(place.offset, place.length) as view:
            assert bytes(view) == place.key.ljust(UNIT, b".")
            assert xxhash.xxh3_64_intdigest(view) == place.checksum


async def test_a_torn_write_carries_the_checksum_of_what_was_meant_and_goes_with_its_first_report() -> None:
    """Invariant 11: one byte differs from what the writer meant. The reader sees it by the checksum, and reports it."""
    node, keys = Node(), chain("a", 1)
    lease_id, claims = node.write(keys)
    with node.arena.view(0, 1) as view:
        view[0] ^= 1
    assert await node.service.commit(lease_id, claims) == Committed(1, 0)
    lease = node.acquire(keys)
    with node.arena.view(lease.blocks[0].offset, UNIT) as view:
        assert xxhash.xxh3_64_intdigest(view) != lease.blocks[0].checksum
    await node.service.release(lease.lease_id, keys)
    assert node.service.acquire(SALT, keys, HOLDER) == Missed()
    assert node.service.statistics().corrupt == 1


async def test_a_commit_for_another_lease_is_rejected() -> None:
    """Keys that the lease does not hold are rejected, each one."""
    node = Node()
    lease_id, _ = node.write(chain("a", 1))
    assert await node.service.commit(lease_id, dict.fromkeys(chain("b", 3), 1)) == Committed(0, 3)


async def test_checksums_of_many_bytes_leave_the_loop(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The same result when what a reader reports is hashed in a thread: all 3 are right and stay."""
    monkeypatch.setattr(serve_blocks, "INLINE_BYTES_MAX", 0)
    node, keys = Node(), chain("a", 3)
    await node.store(keys)
    await node.service.release(node.acquire(keys).lease_id, keys)
    assert len(node.acquire(keys).blocks) == 3


async def test_a_reported_block_is_dropped_only_if_it_is_wrong() -> None:
    """The first report is false and changes nothing; then a bit falls over, and the second report drops the block."""
    node, keys = Node(), chain("a", 2)
    await node.store(keys)
    lease = node.acquire(keys)
    await node.service.release(lease.lease_id, [keys[1]])
    lease = node.acquire(keys)
    assert len(lease.blocks) == 2
    with node.arena.view(lease.blocks[1].offset, 1) as view:
        view[0] ^= 1
    await node.service.release(lease.lease_id, [keys[1]])
    assert len(node.acquire(keys).blocks) == 1
    assert node.service.statistics().corrupt == 1


async def test_leases_end_by_themselves() -> None:
    """1,000 ms after the reservation the slot of a dead writer is free, though nobody called in between."""
    node = Node()
    node.write(chain("a", 1))
    node.clock.advance(999)
    await node.service.expire_leases()
    assert node.service.statistics().units_held == 1
    node.clock.advance(1)
    await node.service.expire_leases()
    assert node.service.statistics().units_held == 0


async def test_an_erased_tenant_finds_nothing() -> None:
    """Both blocks of 64 bytes go."""
    node, keys = Node(), chain("a", 2)
    await node.store(keys)
    assert (await node.service.erase_salt(SALT)).bytes_dropped == 2 * UNIT
    assert node.service.acquire(SALT, keys, HOLDER) == Missed()


async def test_what_is_being_written_when_its_tenant_is_erased_is_overwritten_when_the_writer_is_done() -> None:
    """The writer copies after the erasure has begun, as it does not know of it. The erasure waits for its lease of 1 s;
    until it ends the block counts as left, and no slot goes to anybody else before it is blank."""
    node, keys = Node(), chain("a", 1)
    node.write(keys)
    erased = await node.service.erase_salt(SALT)
    assert (erased.blocks, erased.blocks_left) == (1, 0)
    with node.arena.view(0, 8 * UNIT) as view:
        assert bytes(view) == bytes(8 * UNIT)
    assert node.service.statistics().units_held == 0


async def test_a_writer_that_goes_on_and_on_is_told_as_left() -> None:
    """Its lease of 60 s outlasts the erasure's patience: 1 block is left, and blank once the lease has ended."""
    node, keys = Node(), chain("a", 1)
    assert isinstance(node.service.reserve(new_blocks(keys), Holder("engine-1", 60_000)), Reserved)
    assert (await node.service.erase_salt(SALT)).blocks_left == 1
    with node.arena.view(0, UNIT) as view:
        view[:] = b"x" * UNIT
    node.clock.advance(60_000)
    await node.service.expire_leases()
    assert node.service.usage(SALT)[0] == 0
    with node.arena.view(0, UNIT) as view:
        assert bytes(view) == bytes(UNIT)


async def test_others_are_served_while_much_is_overwritten() -> None:
    """64 blocks are overwritten in 4 steps: between two of them the loop turns."""
    node = Node(units=64)
    await node.store(chain("a", 64))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    assert (await node.service.erase_salt(SALT)).blocks_left == 0
    other.cancel()
    assert turns >= 64 // serve_blocks.OVERWRITE_BLOCKS
