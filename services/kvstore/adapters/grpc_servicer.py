"""`roundhouse.v1.KvStore` over the block service: checks and converts, decides nothing.

Invariant 16: keys and salts come in requests and never go into logs or errors.
"""
# ruff: noqa: N802 - the method names are those of kv.proto

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from roundhouse.errors import InvalidInput
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.kvstore.adapters.fetch_pieces import PIECE_BYTES, fetch_pieces
from services.kvstore.adapters.lending import lent_runs
from services.kvstore.adapters.wire_checks import (
    KEYS_MAX,
    check_digest,
    check_keys,
    check_salt,
    holder_of,
    key_bytes_of,
    shared_of,
)
from services.kvstore.domain.records import Acquired, BlockPlace, NewBlocks, Reserved
from services.kvstore.operations.announce_changes import ChangeAnnouncer
from services.kvstore.operations.fetch_blocks import Wanted
from services.kvstore.operations.send_blocks import PeerService
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import BlockArena, PeerRequest

SERVICE_NAME = kv_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name

RESERVE_KEYS_MAX = 1_024  # one writer takes the arena in pieces, so that others come in between
PEERS_MAX = 8  # addresses of one request; two are asked
SNAPSHOT_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a node's servicer answers from."""

    service: BlockService
    peers: PeerService
    arena: BlockArena
    announcer: ChangeAnnouncer
    slot_bytes: int
    incarnation: str
    source: kv_pb2.TransferSource = field(default_factory=kv_pb2.TransferSource)


class KvStoreServicer(kv_pb2_grpc.KvStoreServicer):
    """One node's blocks. Every method is idempotent but Reserve and Acquire, whose leases end by themselves."""

    def __init__(self, parts: NodeParts) -> None:
        """`parts.incarnation` is new for each process."""
        self._service, self._peers, self._bytes = parts.service, parts.peers, parts.arena
        self._announcer, self._source = parts.announcer, parts.source
        self._arena = kv_pb2.Arena(
            path=parts.arena.path,
            bytes=parts.arena.nbytes,
            slot_bytes=parts.slot_bytes,
            incarnation=parts.incarnation,
        )

    async def DescribeArena(self, request: kv_pb2.DescribeArenaRequest, context: Any) -> kv_pb2.Arena:
        """Where the arena is."""
        return self._arena

    async def AcquirePrefix(self, request: kv_pb2.AcquirePrefixRequest, context: Any) -> kv_pb2.AcquirePrefixReply:
        """The longest stored run, leased. Raises InvalidInput."""
        check_salt(request.salt)
        keys = check_keys(request.keys, KEYS_MAX)
        if len(request.peers) > PEERS_MAX:
            raise InvalidInput(f"at most {PEERS_MAX} peers are expected", param="peers")
        holder = holder_of(request.client_id, request.lease_ms)
        wanted = Wanted(request.salt, keys, shared_of(request.shared), tuple(request.peers), request.hold)
        outcome = await self._service.acquire_waiting(wanted, holder, request.wait_ms)
        found = len(outcome.blocks) if isinstance(outcome, Acquired) else 0
        more = self._service.more(wanted, found) if found < len(keys) else 0
        reply = kv_pb2.AcquirePrefixReply(incarnation=self._arena.incarnation, more=more)
        if isinstance(outcome, Acquired):
            reply.lease_id = outcome.lease_id
            if request.packed:
                reply.length = outcome.blocks[0].length
                reply.offsets.extend([block.offset for block in outcome.blocks])
                reply.checksums.extend([block.checksum for block in outcome.blocks])
            else:
                reply.blocks.extend(_slots(outcome.blocks))
        return reply

    async def ReleaseLease(self, request: kv_pb2.ReleaseLeaseRequest, context: Any) -> kv_pb2.ReleaseLeaseReply:
        """End a lease; unknown ones are fine."""
        await self._service.release(request.lease_id, request.corrupt_keys)
        return kv_pb2.ReleaseLeaseReply()

    async def ReserveBlocks(self, request: kv_pb2.ReserveBlocksRequest, context: Any) -> kv_pb2.ReserveBlocksReply:
        """Slots to write into; none if refused. Raises InvalidInput."""
        check_salt(request.salt)
        keys = check_keys(request.keys, RESERVE_KEYS_MAX)
        check_digest(request.model_digest)
        if request.parent_key:
            check_keys([request.parent_key], 1)
        if request.parent_salt:
            check_salt(request.parent_salt, "parent_salt")
        if not request.length:
            raise InvalidInput("a block has at least one byte", param="length")
        new = NewBlocks(
            request.salt, request.model_digest, request.parent_key, keys, request.length, request.parent_salt
        )
        outcome = self._service.reserve(new, holder_of(request.client_id, request.lease_ms))
        if not isinstance(outcome, Reserved):
            return kv_pb2.ReserveBlocksReply(incarnation=self._arena.incarnation)
        reply = kv_pb2.ReserveBlocksReply(lease_id=outcome.lease_id, incarnation=self._arena.incarnation)
        if request.packed:
            reply.offsets.extend([place.offset for place in outcome.slots])
            reply.numbers.extend(_numbers(keys, outcome.slots))
        else:
            reply.slots.extend(_slots(outcome.slots))
        return reply

    async def CommitBlocks(self, request: kv_pb2.CommitBlocksRequest, context: Any) -> kv_pb2.CommitBlocksReply:
        """Publish what was written well."""
        if request.checksums:
            outcome = await self._service.commit_all(request.lease_id, request.checksums)
        else:
            claims = {block.key: block.checksum for block in request.blocks}
            outcome = await self._service.commit(request.lease_id, claims)
        return kv_pb2.CommitBlocksReply(committed=outcome.committed, rejected=outcome.rejected)

    async def EraseSalt(self, request: kv_pb2.EraseSaltRequest, context: Any) -> kv_pb2.EraseSaltReply:
        """Drop a tenant's blocks. Raises InvalidInput, Unavailable."""
        check_salt(request.salt)
        erased = await self._service.erase_salt(request.salt)
        return kv_pb2.EraseSaltReply(blocks=erased.blocks, bytes=erased.bytes_dropped, blocks_left=erased.blocks_left)

    async def GetStatistics(self, request: kv_pb2.GetStatisticsRequest, context: Any) -> kv_pb2.Statistics:
        """Counts now."""
        counts, disk = self._service.statistics(), self._service.disk_counts()
        peers, sent = self._service.peer_counts(), self._peers.counts()
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
            peers=kv_pb2.PeerStatistics(**asdict(peers), sent=sent.sent),
            holds=sent.holds,
        )

    # For other nodes

    async def Fetch(self, request: kv_pb2.FetchRequest, context: Any) -> AsyncIterator[kv_pb2.FetchPiece]:
        """Blocks in pieces. Raises InvalidInput."""
        bytes_max = PIECE_BYTES if request.packed else 0
        async with aclosing(self._peers.send(_wanted(request), bytes_max)) as parts:
            async for part in parts:
                for piece in fetch_pieces(part, self._bytes, PIECE_BYTES, self._peers.erasures_read):
                    yield piece

    async def Lend(self, requests: AsyncIterator[kv_pb2.LendRequest], context: Any) -> AsyncIterator[kv_pb2.LentBlocks]:
        """Where blocks lie, for a peer that reads them by itself. Raises InvalidInput."""
        first = await anext(requests, None)
        if first is None:
            return
        if not first.kind or first.kind != self._source.kind:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node does not speak that kind of transfer")
        runs = lent_runs(self._peers, _wanted(first.fetch), self._arena.incarnation, first.bytes_max, requests)
        async with aclosing(runs):
            async for run in runs:
                yield run

    async def DescribeTransfer(self, request: kv_pb2.DescribeTransferRequest, context: Any) -> kv_pb2.TransferSource:
        """How the arena is reached from outside."""
        return self._source

    async def Snapshot(self, request: kv_pb2.SnapshotRequest, context: Any) -> AsyncIterator[kv_pb2.SnapshotPart]:
        """All keys, in parts; an empty node sends one empty part. Raises InvalidInput."""
        size = key_bytes_of(request)
        keys = self._service.stored_keys()
        head = kv_pb2.SnapshotPart(
            node_id=self._announcer.node_id,
            incarnation=self._arena.incarnation,
            sequence=self._announcer.sequence,
            key_bytes=size,
            total=len(keys),
        )
        step = SNAPSHOT_PART_BYTES // size
        for first in range(0, max(1, len(keys)), step):
            head.keys = b"".join(key[:size] for key in keys[first : first + step])
            yield head

    async def HoldPrefix(self, request: kv_pb2.HoldPrefixRequest, context: Any) -> kv_pb2.HoldPrefixReply:
        """Pin a chain under a handle. Raises InvalidInput."""
        check_salt(request.salt)
        keys = check_keys(request.keys, KEYS_MAX)
        handle = holder_of(request.handle, request.lease_ms, param="handle")
        blocks = await self._peers.hold(request.salt, keys, handle, request.wait_ms, shared_of(request.shared))
        return kv_pb2.HoldPrefixReply(blocks=blocks)

    async def BringPrefix(self, request: kv_pb2.BringPrefixRequest, context: Any) -> kv_pb2.BringPrefixReply:
        """Have a chain come here as peers compute it. Raises InvalidInput."""
        check_salt(request.salt)
        keys = check_keys(request.keys, KEYS_MAX)
        if len(request.peers) > PEERS_MAX:
            raise InvalidInput(f"at most {PEERS_MAX} peers are expected", param="peers")
        wanted = Wanted(request.salt, keys, shared_of(request.shared), tuple(request.peers), request.hold)
        return kv_pb2.BringPrefixReply(blocks=await self._service.bring(wanted, request.wait_ms))

    async def ReleaseHold(self, request: kv_pb2.ReleaseHoldRequest, context: Any) -> kv_pb2.ReleaseHoldReply:
        """End a hold."""
        self._peers.release_hold(request.salt, request.handle)
        return kv_pb2.ReleaseHoldReply()


def _wanted(request: kv_pb2.FetchRequest) -> PeerRequest:
    """Raises InvalidInput."""
    check_salt(request.salt)
    keys = check_keys(request.keys, KEYS_MAX)
    return PeerRequest(request.salt, keys, request.skip, request.wait_ms, shared_of(request.shared), request.hold)


def _numbers(keys: Sequence[bytes], places: Sequence[BlockPlace]) -> list[int]:
    """Which of `keys` the places are for; empty if the first ones."""
    if places[-1].key == keys[len(places) - 1]:  # both are in order, so the ones before are the same too
        return []
    by_key = {key: number for number, key in enumerate(keys)}
    return [by_key[place.key] for place in places]


def _slots(places: Sequence[BlockPlace]) -> list[kv_pb2.BlockSlot]:
    return [
        kv_pb2.BlockSlot(key=place.key, offset=place.offset, length=place.length, checksum=place.checksum)
        for place in places
    ]
