"""Puts one kvstore together: arena, table, gRPC for the engines, block events for the schedulers.

Order of start: the arena first (whole, or not at all), then gRPC. NATS is not waited for: without it the blocks are
served all the same, nobody hears of them, and readiness says so.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog

from roundhouse import telemetry
from roundhouse.audit_trail import BusAuditTrail
from roundhouse.clock import Clock, SystemClock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus, NatsBus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.lifecycle import Application, Lifecycle
from roundhouse.ops_server import Readiness, serve_ops
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from services.kvstore.adapters.erasure_stream import MarkFile, StreamedOrders
from services.kvstore.adapters.grpc_peers import GrpcPeers
from services.kvstore.adapters.grpc_servicer import SERVICE_NAME, KvStoreServicer, NodeParts
from services.kvstore.adapters.metrics import Counts, table_metrics
from services.kvstore.adapters.nixl_agent import NixlAgent
from services.kvstore.adapters.nixl_peers import NixlPeers
from services.kvstore.adapters.segment_files import SegmentFiles
from services.kvstore.adapters.segment_header import PAGE
from services.kvstore.adapters.shm_arena import shm_arena
from services.kvstore.adapters.tenant_keys import TenantKeys
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.disk_index import DiskIndex
from services.kvstore.domain.erasure_book import ErasureBook
from services.kvstore.domain.peer_directory import PeerDirectory
from services.kvstore.domain.slot_arena import SlotArena
from services.kvstore.operations.announce_changes import ChangeAnnouncer
from services.kvstore.operations.disk_parts import DiskParts
from services.kvstore.operations.disk_tier import READ_LANES, DiskTier
from services.kvstore.operations.fetch_blocks import PeerTier
from services.kvstore.operations.follow_peers import PeerFollower
from services.kvstore.operations.late_erasures import LateErasures
from services.kvstore.operations.send_blocks import PeerService
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import BlockArena, DiskFault, PeerTransport
from services.kvstore.settings import KvStoreSettings

log = structlog.get_logger(__name__)

ERASURES_INTERVAL_MS = 5_000  # between two looks for erasures that this node was not asked for; one small request each
EXPIRY_INTERVAL_MS = 100  # how long memory of a dead client stays held after its lease, if nobody calls meanwhile
ROOM_INTERVAL_MS = 20  # an engine writes 1/128 of an arena of 256 GB in half a second
ANNOUNCE_INTERVAL_MS = 100  # placement may lag this far behind; one message a turn instead of one a block
REPEAT_INTERVAL_MS = 5_000  # a follower that lost the last message of a quiet node learns of it within this time
MEND_INTERVAL_MS = 500  # how long a gap stays open, plus the snapshot
WRITE_INTERVAL_MS = 20  # a block that earned its place waits this long, twice at most
DISK_THREADS = READ_LANES + 1  # and one writer
STOP_GRACE_S_MAX = 2.0  # calls take milliseconds


class _BusLink:
    """The bus once it is there; None until then."""

    def __init__(self, settings: KvStoreSettings, bus: EventBus | None) -> None:
        self.bus = bus
        self._owned: NatsBus | None = None
        self._settings = settings

    async def connect(self) -> None:
        """Try until the server answers, then end."""
        while self.bus is None:
            try:
                name = f"kvstore-{self._settings.node_id}"
                self._owned = self.bus = await NatsBus.connect(self._settings.nats_url, name=name)
            except Unavailable as error:
                log.warning("bus_not_there", text=error.message)
                await asyncio.sleep(1)

    async def close(self) -> None:
        """Disconnect what `connect` made."""
        if self._owned is not None:
            await self._owned.close()


async def _open_disk(
    stack: AsyncExitStack, settings: KvStoreSettings, table: BlockTable, arena: BlockArena, clock: Clock
) -> DiskTier | None:
    """The disk tier, or None: a node without a usable disk serves from memory, and says so in its log."""
    if not settings.data_dir:
        return None
    try:
        folder = Path(settings.data_dir)
        keys = TenantKeys(folder / "keys", _disk_key(settings.disk_key_file)) if settings.disk_key_file else None
        files = SegmentFiles(folder, settings.disk_segment_bytes, keys=keys)
    except DiskFault as fault:
        log.error("no_disk_tier", text=str(fault))
        return None
    stack.callback(files.close)
    threads = stack.enter_context(ThreadPoolExecutor(DISK_THREADS, "disk"))
    index = DiskIndex(settings.disk_bytes, settings.disk_segment_bytes, settings.disk_salt_bytes)
    pages = settings.slot_bytes % PAGE == 0
    parts = DiskParts(table, arena, files, index, clock, threads, settings.disk_segment_bytes, pages)
    disk = DiskTier(parts)
    await disk.open()
    stack.push_async_callback(disk.close)
    return disk


def _peer_transport(
    stack: AsyncExitStack, settings: KvStoreSettings, arena: BlockArena, incarnation: str
) -> tuple[PeerTransport, kv_pb2.TransferSource]:
    """How blocks come from other nodes, and how others get at ours. Raises Unavailable if NIXL is not installed."""
    plain = GrpcPeers()
    if settings.peer_transport == "grpc":
        return plain, kv_pb2.TransferSource()
    agent = NixlAgent(settings.peer_transport, f"{settings.node_id}/{incarnation}")
    stack.callback(agent.close)
    return NixlPeers(agent, plain), agent.offer(arena, incarnation)


def _disk_key(path: str) -> bytes:
    """The cluster's key. Raises Unavailable: without it nothing may be written in the clear instead."""
    try:
        return bytes.fromhex(Path(path).read_text().strip())
    except (OSError, ValueError) as error:
        raise Unavailable(f"the key of the disk cannot be read from {path}") from error


def _late_erasures(
    settings: KvStoreSettings, link: _BusLink, service: BlockService, clock: Clock, mark: MarkFile, book: ErasureBook
) -> Callable[[], Awaitable[None]]:
    """A turn that carries out what was ordered while this node was away, once there is a bus with streams."""
    erasures: LateErasures | None = None

    async def tell(tenant: str, blocks: int) -> None:
        if link.bus is not None:
            details = {"node": settings.node_id, "blocks": str(blocks), "blocks_left": "0"}
            audit = BusAuditTrail(link.bus, clock)
            await audit.record("cache_erased", actor=f"kvstore/{settings.node_id}", subject=tenant, details=details)

    async def turn() -> None:
        nonlocal erasures
        if erasures is None and isinstance(link.bus, NatsBus):
            erasures = LateErasures(service, StreamedOrders(link.bus), mark, tell, book)
        if erasures is not None:
            await erasures.catch_up()

    return turn


def application(settings: KvStoreSettings, *, bus: EventBus | None = None, clock: Clock | None = None) -> Application:
    """The kvstore of one node. Tests may pass a bus and a clock. Starting raises Unavailable (arena, port)."""

    @asynccontextmanager
    async def run(lifecycle: Lifecycle) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            incarnation, now = uuid.uuid4().hex, clock or SystemClock()
            maker = shm_arena(settings.arena_file, settings.arena_bytes)
            arena = await asyncio.to_thread(stack.enter_context, maker)
            table = BlockTable(SlotArena(settings.arena_bytes, settings.slot_bytes), incarnation)
            disk = await _open_disk(stack, settings, table, arena, now)
            directory = PeerDirectory(settings.node_id)
            transport, source = _peer_transport(stack, settings, arena, incarnation)
            stack.push_async_callback(transport.close)
            mark = MarkFile(Path(settings.data_dir) / "erasures-read" if disk is not None else None)
            book = ErasureBook(mark.load())
            fetches = PeerTier(table, arena, transport, directory, now, book)
            stack.push_async_callback(fetches.close)
            service = BlockService(table, arena, now, disk, fetches)
            peers = PeerService(table, service, now, book)
            counts = Counts(service.statistics, service.disk_counts, service.peer_counts, peers.counts)
            stack.enter_context(table_metrics(telemetry.REGISTRY, counts, settings.slot_bytes))

            server = GrpcServer()
            announcer = ChangeAnnouncer(settings.node_id, incarnation)
            parts = NodeParts(service, peers, arena, announcer, settings.slot_bytes, incarnation, source)
            servicer = KvStoreServicer(parts)
            kv_pb2_grpc.add_KvStoreServicer_to_server(servicer, server.server)
            port = await server.start(settings.bind_host, settings.grpc_port, [SERVICE_NAME])
            stack.push_async_callback(server.stop, min(settings.drain_seconds, STOP_GRACE_S_MAX))

            link = _BusLink(settings, bus)
            stack.push_async_callback(link.close)
            follower = PeerFollower(directory, transport, now)
            stack.push_async_callback(follower.stop)

            async def follow() -> None:
                await link.connect()
                if link.bus is not None:
                    await follower.start(link.bus)
                await erase_late()

            erase_late = _late_erasures(settings, link, service, now, mark, book)
            lifecycle.spawn(follow(), "bus")
            readiness = Readiness("nats")

            async def announce() -> None:
                connected = link.bus is not None and link.bus.connected
                readiness.set("nats", reason=None if connected else "NATS does not answer")
                await announcer.announce(service.take_changes(), link.bus)

            if disk is not None:
                lifecycle.every(WRITE_INTERVAL_MS, disk.write_turn, "write blocks to disk")
            lifecycle.every(ERASURES_INTERVAL_MS, erase_late, "erase what was ordered meanwhile")
            lifecycle.every(ROOM_INTERVAL_MS, service.keep_room, "keep room for new blocks")
            lifecycle.every(EXPIRY_INTERVAL_MS, service.expire_leases, "expire leases")
            lifecycle.every(ANNOUNCE_INTERVAL_MS, announce, "announce blocks")
            lifecycle.every(REPEAT_INTERVAL_MS, lambda: announcer.repeat(link.bus), "repeat the sequence")
            lifecycle.every(MEND_INTERVAL_MS, follower.mend, "mend what is known of peers")
            ops_port = await stack.enter_async_context(serve_ops(readiness, settings.bind_host, settings.ops_port))
            log.info("kvstore_ready", grpc_port=port, ops_port=ops_port, arena_bytes=arena.nbytes)
            yield

    return run
