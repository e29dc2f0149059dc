"""The nodes' kvstores, as operators command them: one short-lived channel a command, which are rare."""

import uuid

import grpc

from roundhouse import subjects, telemetry
from roundhouse.clock import Clock
from roundhouse.event_bus import EventBus
from roundhouse.grpc_edge import from_rpc_error, open_channel
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.gateway.operations.erase_cache import NodeErasure


class GrpcNodeCaches:
    """`NodeCaches` over gRPC."""

    async def erase(self, address: str, salt: bytes, *, timeout_ms: int) -> NodeErasure:
        """See `NodeCaches.erase`. What is left is asked apart, so that the proof is not the eraser's own word."""
        timeout, metadata = timeout_ms / 1000, telemetry.trace_metadata()
        try:
            async with open_channel(address) as channel:
                stub = kv_pb2_grpc.KvStoreStub(channel)
                erased = await stub.EraseSalt(kv_pb2.EraseSaltRequest(salt=salt), timeout=timeout, metadata=metadata)
                counted = await stub.GetStatistics(
                    kv_pb2.GetStatisticsRequest(salt=salt), timeout=timeout, metadata=metadata
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "the kvstore did not erase it") from error
        return NodeErasure(erased.blocks, counted.salt_blocks + counted.salt_disk_blocks)


class StreamedErasures:
    """`ErasureOrders` in the stream ERASURES, which the nodes' kvstores read."""

    def __init__(self, bus: EventBus, clock: Clock) -> None:
        """Owns nothing."""
        self._bus, self._clock = bus, clock

    async def order(self, tenant: str, salt_hash: bytes) -> None:
        """See `ErasureOrders.order`."""
        order = kv_pb2.ErasureOrder(tenant_id=tenant, salt_hash=salt_hash, time_unix_ms=self._clock.now_ms())
        await self._bus.publish_durable(subjects.ERASURES, order.SerializeToString(), message_id=uuid.uuid4().hex)
