"""`PeerTransport` over streaming gRPC: one connection a peer; pieces of blocks go into their slots as they come."""

import asyncio

import grpc

from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.kvstore.adapters.fetch_pieces import land_pieces
from services.kvstore.ports import Landing, PeerFault, PeerKeys, PeerRequest


class GrpcPeers:
    """Connections to the kvstores of other nodes."""

    def __init__(self) -> None:
        """Dials nobody yet."""
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def fetch(self, address: str, request: PeerRequest, landing: Landing, *, timeout_ms: int) -> None:
        """See `PeerTransport.fetch`."""
        call = self.stub(address).Fetch(fetch_message(request), timeout=timeout_ms / 1000)
        try:
            await land_pieces(call, landing)
        except grpc.aio.AioRpcError as error:
            raise PeerFault(f"a fetch failed: {error.code().name}") from error
        finally:
            call.cancel()

    async def snapshot(self, address: str, key_bytes: int, *, timeout_ms: int) -> PeerKeys:
        """See `PeerTransport.snapshot`."""
        call = self.stub(address).Snapshot(kv_pb2.SnapshotRequest(key_bytes=key_bytes), timeout=timeout_ms / 1000)
        keys: set[bytes] = set()
        part = None
        try:
            async for part in call:
                keys.update(_cut(part.keys, key_bytes))
        except grpc.aio.AioRpcError as error:
            raise PeerFault(f"a snapshot failed: {error.code().name}") from error
        if part is None or part.key_bytes != key_bytes:
            raise PeerFault("a snapshot without its head")
        return PeerKeys(part.node_id, part.incarnation, part.sequence, frozenset(keys))

    async def close(self) -> None:
        """See `PeerTransport.close`."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def stub(self, address: str) -> "kv_pb2_grpc.KvStoreAsyncStub":
        """Calls to one peer; dials it once."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return kv_pb2_grpc.KvStoreStub(self._channels[address])


def fetch_message(request: PeerRequest) -> kv_pb2.FetchRequest:
    """A request on the wire."""
    return kv_pb2.FetchRequest(
        salt=request.salt,
        keys=request.keys,
        skip=request.skip,
        wait_ms=request.wait_ms,
        shared=kv_pb2.SharedPrefix(salt=request.shared.salt, blocks=request.shared.blocks),
        hold=request.hold,
        packed=True,
    )


def _cut(keys: bytes, size: int) -> list[bytes]:
    return [keys[at : at + size] for at in range(0, len(keys), size)]
