"""`BlockHolds` at the nodes' kvstores: one connection a node, a few short calls in the background for each prefill.

From the grant on the decode node's kvstore is asked to bring the prompt's blocks, which it does as the other node
computes them. Decision: docs/decisions/0145-blocks-that-come-as-computed.md.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import structlog

from roundhouse.grpc_edge import open_channel
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.gateway.ports import BlockTransfer, HeldBlocks

log = structlog.get_logger(__name__)

LEASE_MS = 10_000  # as long as a grant lives without a heartbeat: whoever has not come for the blocks by then is gone
WAIT_MS = 1_000  # the engine stores its last blocks within milliseconds of the first token
TIMEOUT_S = 2.0
BRING_MS = 8_000  # of one call, the most that a kvstore waits; a prompt that takes longer is asked for again
BRING_TIMEOUT_S = BRING_MS / 1000 + 3  # and the time to send them
BRING_PAUSE_S = 0.2  # after a call that ended early: its peer had a fault, and rests for a second


class KvStoreHolds:
    """See the module. `close` when no request runs any more."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, source: str, target: str, held: HeldBlocks) -> BlockTransfer:
        """See `BlockHolds.begin`."""
        return _Transfer(self, source, target, held)

    async def close(self) -> None:
        """Drop what is under way and close all connections."""
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def spawn(self, call: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Make a call in the background."""
        task = asyncio.create_task(call, name=name)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def stub(self, address: str) -> "kv_pb2_grpc.KvStoreAsyncStub":
        """The kvstore at an address."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return kv_pb2_grpc.KvStoreStub(channel)


class _Transfer:
    """`BlockTransfer` between two kvstores; an address may be empty, and nothing is moved or held there then."""

    def __init__(self, holds: KvStoreHolds, source: str, target: str, held: HeldBlocks) -> None:
        self._holds, self._source, self._target, self._held = holds, source, target, held
        self._shared = kv_pb2.SharedPrefix(salt=held.shared.salt, blocks=held.shared.blocks)
        self._complete = False
        self._holding: asyncio.Task[None] | None = None
        wanted = source and target and held.keys
        self._bringing = holds.spawn(self._bring(), "kv-bring") if wanted else None

    def prefilled(self) -> None:
        """See `BlockTransfer.prefilled`."""
        if self._source and self._held.keys and not self._complete:
            self._holding = self._holds.spawn(self._hold(), "kv-hold")

    def end(self) -> None:
        """See `BlockTransfer.end`."""
        for call in (self._bringing, self._holding):
            if call is not None:
                call.cancel()
        moved_without_hold = self._complete and self._holding is None
        if (self._bringing or self._holding) and not moved_without_hold:
            self._holds.spawn(self._release(), "kv-release")
        self._bringing = self._holding = None

    async def _bring(self) -> None:
        request = kv_pb2.BringPrefixRequest(
            salt=self._held.salt,
            keys=self._held.keys,
            peers=[self._source],
            hold=self._held.handle,
            wait_ms=BRING_MS,
            shared=self._shared,
        )
        try:
            while not self._complete:
                reply = await self._holds.stub(self._target).BringPrefix(request, timeout=BRING_TIMEOUT_S)
                self._complete = reply.blocks >= len(self._held.keys)
                if not self._complete:
                    await asyncio.sleep(BRING_PAUSE_S)
        except grpc.aio.AioRpcError as error:
            log.warning("prefill_not_brought", address=self._target, status=error.code().name)

    async def _hold(self) -> None:
        request = kv_pb2.HoldPrefixRequest(
            salt=self._held.salt,
            keys=self._held.keys,
            handle=self._held.handle,
            lease_ms=LEASE_MS,
            wait_ms=WAIT_MS,
            shared=self._shared,
        )
        try:
            await self._holds.stub(self._source).HoldPrefix(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("prefill_not_held", address=self._source, status=error.code().name)

    async def _release(self) -> None:
        request = kv_pb2.ReleaseHoldRequest(salt=self._held.salt, handle=self._held.handle)
        try:
            await self._holds.stub(self._source).ReleaseHold(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:  # it ends by itself
            log.info("hold_not_ended", address=self._source, status=error.code().name)
