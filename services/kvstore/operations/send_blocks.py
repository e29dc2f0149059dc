"""Gives blocks of this node to the kvstores of others, and keeps what somebody is to fetch.

A sender waits for blocks that are still being computed, so that the other side can begin before the last one is there.
Bytes are sent as they lie here, with the checksum of their first writer; whoever receives them checks. What was sent
counts as no use: the copy over there is the one that is used. Decision: docs/decisions/0056-peers.md.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from roundhouse.clock import Clock
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.erasure_book import ErasureBook
from services.kvstore.domain.holds import HoldBook
from services.kvstore.domain.records import Acquired, BlockPlace, Holder, Shared
from services.kvstore.operations.serve_blocks import WAIT_MS_MAX, BlockService
from services.kvstore.ports import PeerRequest

CHUNK_BLOCKS = 32  # leased at once; what follows may be evicted before its turn, which is a miss there
HOLD_MS = 10_000  # a hold of a sender's own; as the gateways', who come for what is left within it
SEND_HOLDER = Holder("peer", 10_000)  # a chunk takes a tenth of a second; a receiver that hangs holds no longer


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One block on its way: where it lies, leased while the caller reads it, and who made it."""

    place: BlockPlace
    model_digest: bytes


@dataclass(frozen=True, slots=True)
class LentRun:
    """Blocks of a chain one after the other, under one lease."""

    lease_id: str
    blocks: tuple[Outgoing, ...]


def parts_of(blocks: Sequence[Outgoing], bytes_max: int) -> Iterator[Sequence[Outgoing]]:
    """Blocks in order, cut into parts of at most `bytes_max`, but one block."""
    part: list[Outgoing] = []
    room = bytes_max
    for block in blocks:
        if part and block.place.length > room:
            yield part
            part, room = [], bytes_max
        part.append(block)
        room -= block.place.length
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class SendCounts:
    """Blocks given to peers since the start; chains held now."""

    sent: int = 0
    holds: int = 0


class PeerService:
    """What other nodes and prefill engines ask of one node. Called on the event loop only."""

    def __init__(self, table: BlockTable, service: BlockService, clock: Clock, book: ErasureBook | None = None) -> None:
        """Owns the holds."""
        self._book = book or ErasureBook()
        self._table, self._service, self._clock = table, service, clock
        self._holds = HoldBook(table)
        self._counts = SendCounts()

    async def send(self, request: PeerRequest, bytes_max: int = 0) -> AsyncGenerator[Sequence[Outgoing], None]:
        """As `lend`, in parts of at most `bytes_max`, but one block; each is leased until the next is wanted."""
        async with aclosing(self.lend(request)) as runs:
            async for run in runs:
                for part in parts_of(run.blocks, bytes_max):
                    if not self._table.is_open(run.lease_id):
                        return
                    yield part

    async def lend(self, request: PeerRequest) -> AsyncGenerator[LentRun, None]:
        """Runs of a chain in order until a block is not here within `wait_ms`; each is leased until the next is wanted.

        Only for a request with a hold, the result of a prefill, are blocks awaited that are not stored yet; what is
        stored of it meanwhile is held, so that the writer's own node does not drop it before its turn. The hold ends
        after the last block of the chain. Cancelled, every lease is given back."""
        until_ms = self._now() + min(request.wait_ms, WAIT_MS_MAX)
        sent = request.skip
        while sent < len(request.keys):
            keys = request.keys[: sent + CHUNK_BLOCKS]
            await self._until_stored(request, keys, sent, until_ms)
            outcome = self._table.lease(request.salt, keys, SEND_HOLDER, self._now(), request.shared)
            if not isinstance(outcome, Acquired):
                return
            if request.hold:
                handle = Holder(request.hold, HOLD_MS)
                self._holds.hold(request.salt, request.keys, handle, self._now(), request.shared)
            try:
                run = tuple(Outgoing(place, self._table.model_digest(place.key)) for place in outcome.blocks[sent:])
                if run:
                    yield LentRun(outcome.lease_id, run)
                    self._counts = replace(self._counts, sent=self._counts.sent + len(run))
            finally:
                self._table.release(outcome.lease_id, self._now())
            if len(outcome.blocks) <= sent:
                return
            sent = len(outcome.blocks)
        if request.hold:
            self.release_hold(request.salt, request.hold)

    async def hold(self, salt: bytes, keys: tuple[bytes, ...], handle: Holder, wait_ms: int, shared: Shared) -> int:
        """Pin the run of `keys` that is stored within `wait_ms` for whoever knows the handle; how many blocks it has.

        Idempotent; a lease that ends by itself, whatever becomes of the caller."""
        until_ms = self._now() + min(wait_ms, WAIT_MS_MAX)
        await self._until_stored(PeerRequest(salt, keys, 0, 0, shared, handle.client_id), keys, len(keys) - 1, until_ms)
        return self._holds.hold(salt, keys, handle, self._now(), shared)

    def release_hold(self, salt: bytes, handle: str) -> bool:
        """End a hold; whether there was one. Idempotent."""
        return self._holds.release(salt, handle, self._now())

    @property
    def erasures_read(self) -> int:
        """Up to which order this node has erased: who has read further takes no blocks of these tenants from it."""
        return self._book.read_to

    def counts(self) -> SendCounts:
        """Counts now."""
        return replace(self._counts, holds=self._holds.count())

    async def _until_stored(self, request: PeerRequest, keys: tuple[bytes, ...], sent: int, until_ms: int) -> None:
        """Wait until more than `sent` leading keys are stored; no longer than until `until_ms`.

        For what lies on disk; and, if somebody is to hold the chain, for what is still being computed."""
        await self._service.promote(request.salt, keys, max(0, until_ms - self._now()), request.shared)
        while request.hold and self._table.run_length(request.salt, keys, request.shared) <= sent:
            news, left_ms = self._service.news, until_ms - self._now()
            if left_ms <= 0:
                return
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await news.wait()
            except TimeoutError:
                return

    def _now(self) -> int:
        return self._clock.monotonic_ms()
