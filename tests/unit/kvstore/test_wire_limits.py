"""What a caller may say, and what it costs when it says too much."""

import pytest

from roundhouse.block_keys import KEY_BYTES
from roundhouse.errors import InvalidInput
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.adapters.grpc_servicer import RESERVE_KEYS_MAX, KvStoreServicer, NodeParts
from services.kvstore.adapters.wire_checks import DIGEST_BYTES_MAX, KEYS_MAX
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.announce_changes import ChangeAnnouncer
from services.kvstore.operations.send_blocks import PeerService
from services.kvstore.operations.serve_blocks import BlockService
from tests.builders.kv_blocks import MODEL, SALT, UNIT
from tests.fakes.block_arena import FakeArena
from tests.fakes.clock import ManualClock

KEY = b"k" * KEY_BYTES


class CountingArena(FakeArena):
    """Knows how often its bytes were looked at."""

    looks = 0

    def view(self, offset: int, length: int) -> memoryview:
        """As `FakeArena`."""
        self.looks += 1
        return super().view(offset, length)


@pytest.fixture
def arena() -> CountingArena:
    """8 slots."""
    return CountingArena(8 * UNIT)


@pytest.fixture
def servicer(arena: CountingArena) -> KvStoreServicer:
    """A node's edge."""
    clock, table = ManualClock(), BlockTable(SlotArena(8 * UNIT, UNIT, UNIT), "run")
    service = BlockService(table, arena, clock)
    peers = PeerService(table, service, clock)
    return KvStoreServicer(NodeParts(service, peers, arena, ChangeAnnouncer("n1", "run"), UNIT, "run"))


def reserve(**wrong: object) -> kv_pb2.ReserveBlocksRequest:
    """Room for one block, but for what is wrong."""
    right: dict[str, object] = {
        "salt": SALT,
        "model_digest": MODEL,
        "keys": [KEY],
        "length": UNIT,
        "client_id": "engine",
        "lease_ms": 1_000,
    }
    return kv_pb2.ReserveBlocksRequest(**{**right, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"salt": b""},
        {"salt": b"s" * 257},
        {"parent_salt": b"s" * 257},
        {"model_digest": b"d" * (DIGEST_BYTES_MAX + 1)},
        {"keys": [b"short"]},
        {"keys": [KEY] * (RESERVE_KEYS_MAX + 1)},
        {"parent_key": b"short"},
        {"length": 0},
        {"client_id": ""},
        {"client_id": "c" * 129},
    ],
    ids=lambda wrong: f"{next(iter(wrong))} {len(str(next(iter(wrong.values()))))}",
)
async def test_what_no_block_can_have_is_refused(servicer: KvStoreServicer, wrong: dict[str, object]) -> None:
    """Before anything is held. A digest that no header on disk can hold would have stopped the disk for everybody."""
    with pytest.raises(InvalidInput):
        await servicer.ReserveBlocks(reserve(**wrong), None)
    assert (await servicer.GetStatistics(kv_pb2.GetStatisticsRequest(), None)).slots_held == 0


async def test_a_block_larger_than_any_slot_and_a_key_named_twice_are_no_error(servicer: KvStoreServicer) -> None:
    """Nothing is given for the one; for the other its first mention counts."""
    assert not (await servicer.ReserveBlocks(reserve(length=2**32 - 1), None)).lease_id
    reply = await servicer.ReserveBlocks(reserve(keys=[KEY, KEY, KEY]), None)
    assert [slot.key for slot in reply.slots] == [KEY]


async def test_no_more_keys_than_any_prompt_has(servicer: KvStoreServicer) -> None:
    """65,536 are looked up, one more is refused."""
    request = kv_pb2.AcquirePrefixRequest(salt=SALT, keys=[KEY] * KEYS_MAX, client_id="engine", lease_ms=1)
    assert not (await servicer.AcquirePrefix(request, None)).lease_id
    request.keys.append(KEY)
    with pytest.raises(InvalidInput):
        await servicer.AcquirePrefix(request, None)


async def test_a_block_that_is_reported_many_times_is_looked_at_once(
    servicer: KvStoreServicer, arena: CountingArena
) -> None:
    """1,000 reports of one block in one release."""
    reserved = await servicer.ReserveBlocks(reserve(), None)
    await servicer.CommitBlocks(kv_pb2.CommitBlocksRequest(lease_id=reserved.lease_id, blocks=reserved.slots), None)
    acquire = kv_pb2.AcquirePrefixRequest(salt=SALT, keys=[KEY], client_id="engine", lease_ms=1_000)
    lease_id = (await servicer.AcquirePrefix(acquire, None)).lease_id
    arena.looks = 0
    await servicer.ReleaseLease(kv_pb2.ReleaseLeaseRequest(lease_id=lease_id, corrupt_keys=[KEY] * 1_000), None)
    assert arena.looks == 1
