"""The lender's side of `KvStore.Lend`: leases runs of blocks while somebody else reads them out of the arena."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from roundhouse.wire.v1 import kv_pb2
from services.kvstore.operations.send_blocks import Outgoing, PeerService, parts_of
from services.kvstore.ports import PeerRequest


async def lent_runs(
    peers: PeerService, wanted: PeerRequest, incarnation: str, bytes_max: int, asked: AsyncIterator[kv_pb2.LendRequest]
) -> AsyncGenerator[kv_pb2.LentBlocks, None]:
    """Runs of at most `bytes_max`, but one block; the next one once `asked` has a message. Ends when `asked` does."""
    async with aclosing(peers.lend(wanted)) as runs:
        async for run in runs:
            for part in parts_of(run.blocks, bytes_max):
                lent = [_lent(block) for block in part]
                yield kv_pb2.LentBlocks(incarnation=incarnation, blocks=lent, erasures_read=peers.erasures_read)
                if await anext(asked, None) is None:
                    return


def _lent(block: Outgoing) -> kv_pb2.LentBlock:
    place = block.place
    return kv_pb2.LentBlock(
        key=place.key,
        offset=place.offset,
        length=place.length,
        checksum=place.checksum,
        model_digest=block.model_digest,
    )
