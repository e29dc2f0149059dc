"""`PeerTransport` over NIXL: gRPC says which blocks a peer has and where they lie, NIXL brings the bytes.

The peer leases a run of blocks, this side reads it out of the peer's arena and asks for the next one; a lease that ends
too early shows as a wrong checksum, which is a miss (invariant 11). A peer that does not speak the same kind of
transfer, or is of an older release, is asked over gRPC. Decision: docs/decisions/0140-nixl.md.
"""

import asyncio
import time

import grpc

from roundhouse.wire.v1 import kv_pb2
from services.kvstore.adapters.grpc_peers import GrpcPeers, fetch_message
from services.kvstore.adapters.nixl_agent import BUFFER_BYTES, NixlAgent, Source
from services.kvstore.ports import BlockHead, Landing, PeerFault, PeerKeys, PeerRequest

PLAIN_S = 30.0  # how long a peer that does not speak NIXL is not asked whether it does by now
BLOCK_BYTES_MAX = 64 << 20  # the largest slot of any arena
RUN_BLOCKS_MAX = 4_096  # taken from a peer of another release


class _NotSpokenError(Exception):
    """The peer does not speak this kind of transfer."""


class NixlPeers:
    """Transfers from the kvstores of other nodes, `plain` for whatever is not bytes of blocks."""

    def __init__(self, agent: NixlAgent, plain: GrpcPeers) -> None:
        """Closes `plain`, not the agent."""
        self._agent, self._plain = agent, plain
        self._sources: dict[str, tuple[str, Source]] = {}
        self._plain_until_s: dict[str, float] = {}
        self._meeting = asyncio.Lock()  # NIXL meets a peer once, however many fetches wait for that

    async def fetch(self, address: str, request: PeerRequest, landing: Landing, *, timeout_ms: int) -> None:
        """See `PeerTransport.fetch`."""
        if self._plain_until_s.get(address, 0.0) <= time.monotonic():
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    return await self._borrow(address, request, landing, timeout_ms)
            except _NotSpokenError:
                self._plain_until_s[address] = time.monotonic() + PLAIN_S
            except TimeoutError as error:
                raise PeerFault("a transfer took too long") from error
        await self._plain.fetch(address, request, landing, timeout_ms=timeout_ms)
        return None

    def asked_plainly(self) -> frozenset[str]:
        """Peers that did not speak NIXL when they were last asked."""
        return frozenset(self._plain_until_s)

    async def snapshot(self, address: str, key_bytes: int, *, timeout_ms: int) -> PeerKeys:
        """See `PeerTransport.snapshot`."""
        return await self._plain.snapshot(address, key_bytes, timeout_ms=timeout_ms)

    async def close(self) -> None:
        """See `PeerTransport.close`."""
        for address in tuple(self._sources):
            await self._forget(address)
        await self._plain.close()

    async def _borrow(self, address: str, request: PeerRequest, landing: Landing, timeout_ms: int) -> None:
        call = self._plain.stub(address).Lend(timeout=timeout_ms / 1000)
        try:
            wanted = fetch_message(request)
            await call.write(kv_pb2.LendRequest(fetch=wanted, kind=self._agent.kind, bytes_max=BUFFER_BYTES))
            while isinstance(run := await call.read(), kv_pb2.LentBlocks):
                source = await self._source(address, run.incarnation)
                _check(run)
                async with self._agent.read(source, [(block.offset, block.length) for block in run.blocks]) as data:
                    await call.write(kv_pb2.LendRequest())  # the next run is leased while this one is looked at
                    if not _land(run, data, landing):
                        return
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise _NotSpokenError from error
            raise PeerFault(f"a transfer failed: {error.code().name}") from error
        except asyncio.InvalidStateError as error:  # the call ended while it was written to
            raise PeerFault("a transfer failed: it ended too early") from error
        except PeerFault:
            await self._forget(address)  # it may have died: NIXL has to meet it anew
            raise
        finally:
            call.cancel()

    async def _source(self, address: str, incarnation: str) -> Source:
        """The arena of a peer as it is now."""
        async with self._meeting:
            return await self._met(address, incarnation)

    async def _met(self, address: str, incarnation: str) -> Source:
        known, source = self._sources.get(address, ("", None))
        if source is not None and known == incarnation:
            return source
        await self._forget(address)
        said = await self._plain.stub(address).DescribeTransfer(kv_pb2.DescribeTransferRequest(), timeout=10)
        if said.incarnation != incarnation or said.kind != self._agent.kind:
            raise PeerFault("a peer that has just been started again")
        source = await self._agent.open(said)
        self._sources[address] = incarnation, source
        return source

    async def _forget(self, address: str) -> None:
        _, source = self._sources.pop(address, ("", None))
        if source is not None:
            await self._agent.forget(source)


def _check(run: kv_pb2.LentBlocks) -> None:
    lengths = [block.length for block in run.blocks]
    fits = len(lengths) == 1 or sum(lengths) <= BUFFER_BYTES
    if not fits or not 0 < len(lengths) <= RUN_BLOCKS_MAX or not 0 < min(lengths) <= max(lengths) <= BLOCK_BYTES_MAX:
        raise PeerFault("a run of blocks that was not asked for")


def _land(run: kv_pb2.LentBlocks, data: memoryview, landing: Landing) -> bool:
    """Copy blocks to their places; False if one is not wanted."""
    at = 0
    for block in run.blocks:
        head = BlockHead(block.key, block.length, block.checksum, block.model_digest, run.erasures_read)
        place = landing.begin(head)
        if place is None:
            return False
        place[:] = data[at : at + block.length]
        at += block.length
        landing.landed()
    return True
