"""`BlockLists` over gRPC, one channel a kvstore."""

import grpc

from roundhouse.errors import Unavailable
from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.scheduler.ports import BlockList

KEY_BYTES = 8  # what `domain/prefix_index.py` keeps of a key
TIMEOUT_S = 10.0  # a million keys are 8 MB: a fraction of a second, and far more on a loaded host


class GrpcBlockLists:
    """Channels stay open until `close`; there are as many as nodes ever lost an announcement."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def list_blocks(self, address: str) -> BlockList:
        """See `BlockLists.list_blocks`."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        stub = kv_pb2_grpc.KvStoreStub(self._channels[address])
        keys: list[bytes] = []
        incarnation, sequence = "", 0
        try:
            async for part in stub.Snapshot(kv_pb2.SnapshotRequest(key_bytes=KEY_BYTES), timeout=TIMEOUT_S):
                incarnation, sequence, size = part.incarnation, part.sequence, part.key_bytes or KEY_BYTES
                keys += (part.keys[start : start + size] for start in range(0, len(part.keys), size))
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the block list: {error.code().name}") from error
        return BlockList(incarnation, sequence, tuple(keys))

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
