"""Brings blocks of other nodes into this node's arena when an engine asks for them and they are nowhere here.

The bytes go from the transport straight into their slots; a block is published only if they have the checksum of its
first writer (invariant 11). Blocks become visible in growing batches, so that a reader can begin before the last one
has come. A peer that fails is not asked for a while; every fault is a miss. Whom to ask: those the caller names,
then those the directory knows. Decision: docs/decisions/0056-peers.md.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
import xxhash

from roundhouse.clock import Clock
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.erasure_book import ErasureBook
from services.kvstore.domain.peer_directory import PeerDirectory
from services.kvstore.domain.records import (
    NOTHING_SHARED,
    ROOT,
    BlockPlace,
    Holder,
    NewBlocks,
    Refused,
    Shared,
    WrittenBlock,
)
from services.kvstore.ports import BlockArena, BlockHead, PeerFault, PeerRequest, PeerTransport

log = structlog.get_logger(__name__)

PEERS_ASKED_MAX = 2  # one after the other; a third would hardly answer within the caller's patience
FETCH_MS_MAX = 10_000  # of one exchange
PEER_HOLDER = Holder("peer", 30_000)  # longer than any exchange, so that no slot is another's while bytes still come
REST_MS = 1_000  # a peer that failed is left alone this long
ERASED_QUIET_MS = 30_000  # nothing of an erased salt is fetched: the erasure may not have reached every node yet
BATCH_BLOCKS_MAX = 16
BRING_MS_MAX = 8_000  # of one wait for blocks that are being computed: leaves time to send them within `FETCH_MS_MAX`


@dataclass(frozen=True, slots=True)
class PeerCounts:
    """Blocks and bytes taken from peers, and what went wrong, since the start; `known_keys` now."""

    fetched: int = 0
    bytes_fetched: int = 0
    corrupt: int = 0
    failures: int = 0
    known_keys: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chain that an engine asks for. `peers` are addresses to ask first; `hold` is a handle at these."""

    salt: bytes
    keys: tuple[bytes, ...]
    shared: Shared = NOTHING_SHARED
    peers: tuple[str, ...] = ()
    hold: str = ""


@dataclass(slots=True, eq=False)
class _Exchange:
    """A fetch that runs, and how many wait for it."""

    keys: tuple[bytes, ...]  # that it may bring
    task: asyncio.Task[None]
    waiting: int = 0


class PeerTier:
    """The other nodes, as a tier below memory and disk. Called on the event loop only."""

    def __init__(
        self,
        table: BlockTable,
        arena: BlockArena,
        transport: PeerTransport,
        directory: PeerDirectory,
        clock: Clock,
        book: ErasureBook | None = None,
    ) -> None:
        """Owns the fetches that run; whoever made the transport closes it."""
        self._book = book or ErasureBook()
        self._table, self._arena, self._clock = table, arena, clock
        self._transport, self._directory = transport, directory
        self._running: dict[bytes, _Exchange] = {}  # by each key that it may bring
        self._resting_until_ms: dict[str, int] = {}
        self._quiet_until_ms: dict[bytes, int] = {}
        self._counts = PeerCounts()

    async def fetch(self, wanted: Wanted, wait_ms: int) -> None:
        """Bring what is missing of a chain, waiting at most `wait_ms`; what comes later is there for the next caller.

        Two callers that miss the same block wait for the same exchange."""
        have = self._table.run_length(wanted.salt, wanted.keys, wanted.shared)
        if have == len(wanted.keys) or self._is_quiet(wanted):
            return
        asked = self._whom_to_ask(wanted, have)
        if not asked:
            return
        await self._awaited(self._exchange(wanted, asked, have, wait_ms), wait_ms, leave_running=True)

    async def bring(self, wanted: Wanted, wait_ms: int) -> int:
        """As `fetch`, for a chain that is being computed elsewhere; returns how many leading blocks are here then.

        Whoever asks for a part of it meanwhile waits for the same exchange. Cancelled, it ends if nobody does."""
        have = self._table.run_length(wanted.salt, wanted.keys, wanted.shared)
        if have < len(wanted.keys) and not self._is_quiet(wanted):
            wait_ms = min(wait_ms, BRING_MS_MAX)
            asked = self._whom_to_ask(wanted, have)
            if asked and wait_ms > 0:
                await self._awaited(self._exchange(wanted, asked, have, wait_ms), wait_ms, leave_running=False)
            have = self._table.run_length(wanted.salt, wanted.keys, wanted.shared)
        return have

    def run_length(self, wanted: Wanted, have: int) -> int:
        """How many blocks after the first `have` somebody probably has: all, if the caller says who."""
        if have == len(wanted.keys) or self._is_quiet(wanted):
            return 0
        return len(wanted.keys) - have if wanted.peers else self._directory.run_length(wanted.keys[have:])

    def erased(self, salt: bytes) -> None:
        """Fetch nothing of a salt for a while."""
        now_ms = self._clock.monotonic_ms()
        self._quiet_until_ms = {key: until for key, until in self._quiet_until_ms.items() if until > now_ms}
        self._quiet_until_ms[salt] = now_ms + ERASED_QUIET_MS

    def counts(self) -> PeerCounts:
        """Counts now."""
        return replace(self._counts, known_keys=self._directory.keys_known())

    async def close(self) -> None:
        """End every exchange."""
        tasks = {exchange.task for exchange in self._running.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _exchange(self, wanted: Wanted, asked: Sequence[str], have: int, wait_ms: int) -> _Exchange:
        """The exchange that brings the first missing block: the one that runs, or a new one. O(missing)."""
        running = self._running.get(wanted.keys[have])
        if running is None:
            task = asyncio.create_task(self._fetch(wanted, asked, wait_ms), name="fetch blocks from peers")
            running = _Exchange(wanted.keys[have:], task)
            self._running.update(dict.fromkeys(running.keys, running))
            task.add_done_callback(partial(self._ended, running))
        return running

    async def _awaited(self, exchange: _Exchange, wait_ms: int, *, leave_running: bool) -> None:
        exchange.waiting += 1
        try:
            await asyncio.wait({exchange.task}, timeout=wait_ms / 1000)
        except asyncio.CancelledError:
            if exchange.waiting == 1 and not leave_running:
                exchange.task.cancel()
            raise
        finally:
            exchange.waiting -= 1

    def _ended(self, exchange: _Exchange, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:  # nobody waits for more than its end
            log.error("peer_exchange_failed", error=repr(task.exception()))
        for key in exchange.keys:
            if self._running.get(key) is exchange:
                del self._running[key]

    def _is_quiet(self, wanted: Wanted | PeerRequest) -> bool:
        now_ms = self._clock.monotonic_ms()
        return any(self._quiet_until_ms.get(salt, 0) > now_ms for salt in (wanted.salt, wanted.shared.salt))

    def _may_land(self, request: PeerRequest, erasures_read: int) -> bool:
        salts = (request.salt, request.shared.salt) if request.shared.blocks else (request.salt,)
        return not self._is_quiet(request) and all(self._book.may_come(salt, erasures_read) for salt in salts)

    def _whom_to_ask(self, wanted: Wanted, have: int) -> list[str]:
        now_ms = self._clock.monotonic_ms()
        known = self._directory.holders(wanted.keys[have:])
        asked = [address for address in dict.fromkeys((*wanted.peers, *known)) if address]
        return [address for address in asked if self._resting_until_ms.get(address, 0) <= now_ms][:PEERS_ASKED_MAX]

    async def _fetch(self, wanted: Wanted, asked: Sequence[str], wait_ms: int) -> None:
        until_ms = self._clock.monotonic_ms() + min(wait_ms, FETCH_MS_MAX)
        for address in asked:
            have = self._table.run_length(wanted.salt, wanted.keys, wanted.shared)
            left_ms = until_ms - self._clock.monotonic_ms()
            if have == len(wanted.keys) or left_ms <= 0 or self._is_quiet(wanted):
                return
            # Only where a hold is, or is to come, may the blocks still be computed; the others have them or do not.
            hold = wanted.hold if address in wanted.peers else ""
            request = PeerRequest(wanted.salt, wanted.keys, have, left_ms, wanted.shared, hold)
            await self._fetch_from(address, request)

    async def _fetch_from(self, address: str, request: PeerRequest) -> None:
        landing = SlotLanding(self._table, self._arena, self._clock, request, partial(self._may_land, request))
        try:
            await self._transport.fetch(address, request, landing, timeout_ms=FETCH_MS_MAX)
        except PeerFault as fault:
            now_ms = self._clock.monotonic_ms()
            resting = {peer: until for peer, until in self._resting_until_ms.items() if until > now_ms}
            self._resting_until_ms = {**resting, address: now_ms + REST_MS}
            self._count(failures=1)
            log.warning("peer_fault", peer=address, text=str(fault))
        finally:
            landing.finish()
            self._count(fetched=landing.blocks, bytes_fetched=landing.nbytes, corrupt=landing.corrupt)

    def _count(self, **more: int) -> None:
        counts = self._counts
        self._counts = replace(counts, **{name: getattr(counts, name) + count for name, count in more.items()})


class SlotLanding:
    """`Landing` in the slots of a table: reserves ahead, publishes in batches of 1, 2, 4, … blocks."""

    def __init__(
        self,
        table: BlockTable,
        arena: BlockArena,
        clock: Clock,
        request: PeerRequest,
        may_land: Callable[[int], bool],
    ) -> None:
        """For the blocks of `request.keys` after the first `request.skip`. `may_land` says whether they may still come
        from who has carried out so many erasures."""
        self._may_land = may_land
        self._table, self._arena, self._clock, self._request = table, arena, clock, request
        self._next = request.skip
        self._batch = 1
        self._lease_id = ""
        self._places: dict[bytes, BlockPlace] = {}
        self._written: list[WrittenBlock] = []
        self._head: BlockHead | None = None
        self._length = 0
        self.blocks = self.nbytes = self.corrupt = 0

    def begin(self, head: BlockHead) -> memoryview | None:
        """See `Landing`. Not wanted: another block than the next one, one that is here by now, one without room."""
        keys = self._request.keys
        if self._next >= len(keys) or head.key != keys[self._next] or not head.length or self.corrupt:
            return None
        if not self._may_land(head.erasures_read):
            return None
        if head.key not in self._places:
            self._publish()
            self._reserve(head)
        place = self._places.get(head.key)
        if place is None or place.length != head.length:
            return None
        self._head, self._length = head, head.length
        return self._arena.view(place.offset, place.length)

    def landed(self) -> None:
        """See `Landing`."""
        head, self._head = self._head, None
        assert head is not None
        place = self._places.pop(head.key)
        with self._arena.view(place.offset, place.length) as view:
            found = xxhash.xxh3_64_intdigest(view)
        self._written.append(WrittenBlock(head.key, head.checksum, found))
        self.corrupt += found != head.checksum
        self._next += 1
        if not self._places:
            self._publish()

    def finish(self) -> None:
        """Publish what landed well, give back the rest. Idempotent."""
        self._publish()

    def _reserve(self, head: BlockHead) -> None:
        shared, stop = self._request.shared, self._next + self._batch
        if self._next < shared.blocks:
            stop = min(stop, shared.blocks)
        keys = self._request.keys[self._next : stop]
        parent = self._request.keys[self._next - 1] if self._next else ROOT
        salt = shared.salt_at(self._next, self._request.salt)
        new = NewBlocks(salt, head.model_digest, parent, keys, head.length, shared.salt)
        outcome = self._table.reserve(new, PEER_HOLDER, self._clock.monotonic_ms())
        if not isinstance(outcome, Refused):
            self._lease_id = outcome.lease_id
            self._places = {place.key: place for place in outcome.slots}
            self._batch = min(2 * self._batch, BATCH_BLOCKS_MAX)

    def _publish(self) -> None:
        if self._lease_id:
            outcome = self._table.commit(self._lease_id, self._written, self._clock.monotonic_ms())
            self.blocks += outcome.committed
            self.nbytes += outcome.committed * self._length
        self._lease_id, self._places, self._written = "", {}, []
