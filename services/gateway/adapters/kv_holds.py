"""`BlockHolds` at the nodes' kvstores: one connection a node, one short call in the background for each prefill."""

import asyncio

import grpc
import structlog

from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.gateway.ports import HeldBlocks

log = structlog.get_logger(__name__)

LEASE_MS = 10_000  # as long as a grant lives without a heartbeat: whoever has not come for the blocks by then is gone
WAIT_MS = 1_000  # the engine stores its last blocks within milliseconds of the first token
TIMEOUT_S = 2.0


class KvStoreHolds:
    """See the module. `close` when no request runs any more."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def hold(self, address: str, held: HeldBlocks) -> None:
        """See `BlockHolds.hold`."""
        if not address or not held.keys:
            return
        call = asyncio.create_task(self._hold(address, held), name="kv-hold")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """Drop what is under way and close all connections."""
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _hold(self, address: str, held: HeldBlocks) -> None:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        request = kv_pb2.HoldPrefixRequest(
            salt=held.salt,
            keys=held.keys,
            handle=held.handle,
            lease_ms=LEASE_MS,
            wait_ms=WAIT_MS,
            shared=kv_pb2.SharedPrefix(salt=held.shared.salt, blocks=held.shared.blocks),
        )
        try:
            await kv_pb2_grpc.KvStoreStub(channel).HoldPrefix(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("prefill_not_held", address=address, status=error.code().name)
