"""`roundhouse.v1.KvStore` over the block service: checks and converts, decides nothing.

Invariant 16: keys and salts come in requests and never go into logs or errors.
"""
# ruff: noqa: N802 - the method names are those of kv.proto

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from roundhouse.block_keys import KEY_BYTES
from roundhouse.errors import InvalidInput
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.kvstore.domain.records import Acquired, BlockPlace, Holder, NewBlocks, Reserved
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import BlockArena

SERVICE_NAME = kv_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name

KEYS_MAX = 65_536  # a prompt of a million tokens in blocks of 16
RESERVE_KEYS_MAX = 1_024  # one writer takes the arena in pieces, so that others come in between
SALT_BYTES_MAX = 256
CLIENT_ID_CHARACTERS_MAX = 128


class KvStoreServicer(kv_pb2_grpc.KvStoreServicer):
    """One node's blocks. Every method is idempotent but Reserve and Acquire, whose leases end by themselves."""

    def __init__(self, service: BlockService, arena: BlockArena, *, slot_bytes: int, incarnation: str) -> None:
        """`incarnation` is new for each process."""
        self._service = service
        self._arena = kv_pb2.Arena(path=arena.path, bytes=arena.nbytes, slot_bytes=slot_bytes, incarnation=incarnation)

    async def DescribeArena(self, request: kv_pb2.DescribeArenaRequest, context: Any) -> kv_pb2.Arena:
        """Where the arena is."""
        return self._arena

    async def AcquirePrefix(self, request: kv_pb2.AcquirePrefixRequest, context: Any) -> kv_pb2.AcquirePrefixReply:
        """The longest stored run, leased. Raises InvalidInput."""
        _check_salt(request.salt)
        _check_keys(request.keys, KEYS_MAX)
        holder = _holder(request.client_id, request.lease_ms)
        outcome = await self._service.acquire_waiting(request.salt, request.keys, holder, request.wait_ms)
        if not isinstance(outcome, Acquired):
            return kv_pb2.AcquirePrefixReply(incarnation=self._arena.incarnation)
        return kv_pb2.AcquirePrefixReply(
            lease_id=outcome.lease_id, blocks=_slots(outcome.blocks), incarnation=self._arena.incarnation
        )

    async def ReleaseLease(self, request: kv_pb2.ReleaseLeaseRequest, context: Any) -> kv_pb2.ReleaseLeaseReply:
        """End a lease; unknown ones are fine."""
        await self._service.release(request.lease_id, request.corrupt_keys)
        return kv_pb2.ReleaseLeaseReply()

    async def ReserveBlocks(self, request: kv_pb2.ReserveBlocksRequest, context: Any) -> kv_pb2.ReserveBlocksReply:
        """Slots to write into; none if refused. Raises InvalidInput."""
        _check_salt(request.salt)
        _check_keys(request.keys, RESERVE_KEYS_MAX)
        if request.parent_key:
            _check_keys([request.parent_key], 1)
        if not request.length:
            raise InvalidInput("a block has at least one byte", param="length")
        new = NewBlocks(request.salt, request.model_digest, request.parent_key, tuple(request.keys), request.length)
        outcome = self._service.reserve(new, _holder(request.client_id, request.lease_ms))
        if not isinstance(outcome, Reserved):
            return kv_pb2.ReserveBlocksReply(incarnation=self._arena.incarnation)
        return kv_pb2.ReserveBlocksReply(
            lease_id=outcome.lease_id, slots=_slots(outcome.slots), incarnation=self._arena.incarnation
        )

    async def CommitBlocks(self, request: kv_pb2.CommitBlocksRequest, context: Any) -> kv_pb2.CommitBlocksReply:
        """Publish what was written well."""
        outcome = await self._service.commit(request.lease_id, {block.key: block.checksum for block in request.blocks})
        return kv_pb2.CommitBlocksReply(committed=outcome.committed, rejected=outcome.rejected)

    async def EraseSalt(self, request: kv_pb2.EraseSaltRequest, context: Any) -> kv_pb2.EraseSaltReply:
        """Drop a tenant's blocks. Raises InvalidInput, Unavailable."""
        _check_salt(request.salt)
        erased = await self._service.erase_salt(request.salt)
        return kv_pb2.EraseSaltReply(blocks=erased.blocks, bytes=erased.bytes_dropped, blocks_left=erased.blocks_left)

    async def GetStatistics(self, request: kv_pb2.GetStatisticsRequest, context: Any) -> kv_pb2.Statistics:
        """Counts now."""
        counts, disk = self._service.statistics(), self._service.disk_counts()
        blocks, size, disk_blocks, disk_bytes = self._service.usage(request.salt) if request.salt else (0, 0, 0, 0)
        return kv_pb2.Statistics(
            slots_total=counts.units_total,
            slots_free=counts.units_free,
            slots_held=counts.units_held,
            slots_leased=counts.units_leased,
            hits=counts.hits,
            misses=counts.misses,
            evictions=counts.evictions,
            corrupt=counts.corrupt,
            blocks=counts.blocks,
            leases=counts.leases,
            leases_expired=counts.leases_expired,
            disk=kv_pb2.DiskStatistics(**asdict(disk)),
            salt_blocks=blocks,
            salt_bytes=size,
            salt_disk_blocks=disk_blocks,
            salt_disk_bytes=disk_bytes,
        )


def _slots(places: Sequence[BlockPlace]) -> list[kv_pb2.BlockSlot]:
    return [
        kv_pb2.BlockSlot(key=place.key, offset=place.offset, length=place.length, checksum=place.checksum)
        for place in places
    ]


def _holder(client_id: str, lease_ms: int) -> Holder:
    if not client_id or len(client_id) > CLIENT_ID_CHARACTERS_MAX:
        raise InvalidInput(f"1 to {CLIENT_ID_CHARACTERS_MAX} characters are expected", param="client_id")
    return Holder(client_id, lease_ms)


def _check_salt(salt: bytes) -> None:
    if not salt or len(salt) > SALT_BYTES_MAX:
        raise InvalidInput(f"1 to {SALT_BYTES_MAX} bytes are expected", param="salt")


def _check_keys(keys: Sequence[bytes], count_max: int) -> None:
    if len(keys) > count_max:
        raise InvalidInput(f"at most {count_max} keys at once", param="keys")
    if any(len(key) != KEY_BYTES for key in keys):
        raise InvalidInput(f"a key has {KEY_BYTES} bytes", param="keys")
