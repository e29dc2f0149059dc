"""What the loader sends over NATS: its node's state, the copy of it in the key-value bucket, and audit events."""

import asyncio
import uuid
from typing import Any

import structlog
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NoStreamResponseError, NotFoundError

from roundhouse import subjects
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus, NatsBus
from roundhouse.vocabulary import NodeId
from roundhouse.wire.v1 import events_pb2, loading_pb2
from services.loader.ports import AuditNote

log = structlog.get_logger(__name__)

BUCKET_TTL_S = 10.0  # a node that said nothing for ten of its periods is gone
PUT_TIMEOUT_S = 1.0
WAITING_MAX = 1_000  # audit events kept while the stream is away; a loader makes a few a minute
RETRY_MS = 1_000


class NatsStateSink:
    """`StateSink` over NATS and a JetStream key-value bucket, which is made again when a restart lost it."""

    def __init__(self, bus: NatsBus, node_id: NodeId) -> None:
        self._bus = bus
        self._subject = subjects.node_state(node_id)
        self._key = f"$KV.{subjects.NODES_BUCKET}.{subjects.encode_token(node_id)}"

    async def publish(self, state: loading_pb2.NodeState) -> None:
        """See `StateSink.publish`."""
        await self._bus.publish(self._subject, state.SerializeToString())

    async def keep(self, state: loading_pb2.NodeState) -> None:
        """See `StateSink.keep`."""
        data = state.SerializeToString()
        try:
            try:
                await self._put(data)
            except (NotFoundError, NoStreamResponseError):
                await self._make_bucket()
                await self._put(data)
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable("the bucket of node states takes nothing now") from error

    async def _put(self, data: bytes) -> None:
        # A put of nats-py's KeyValue is this publish; its object would outlive the bucket.
        await self._bus.jetstream.publish(self._key, data, timeout=PUT_TIMEOUT_S)

    async def _make_bucket(self) -> None:
        config: Any = KeyValueConfig(
            bucket=subjects.NODES_BUCKET, history=1, ttl=BUCKET_TTL_S, storage=StorageType.MEMORY
        )
        await self._bus.jetstream.create_key_value(config)
        log.info("bucket_made", bucket=subjects.NODES_BUCKET)


def _digest_of(note: AuditNote) -> dict[str, str]:
    return {} if note.version is None else {"digest": note.version.digest}


class BusAuditTrail:
    """`AuditTrail` in the AUDIT stream: a bounded queue and one loop that sends it, again if need be."""

    def __init__(self, bus: EventBus, node_id: NodeId, clock: Clock) -> None:
        self._bus = bus
        self._node_id = node_id
        self._clock = clock
        self._waiting: asyncio.Queue[tuple[str, events_pb2.AuditEvent]] = asyncio.Queue(WAITING_MAX)

    def record(self, note: AuditNote) -> None:
        """See `AuditTrail.record`."""
        event = events_pb2.AuditEvent(
            time_unix_ms=self._clock.now_ms(),
            what=note.what,
            actor=f"loader/{self._node_id}",
            subject=self._node_id if note.version is None else note.version.model,
            reason=note.reason,
            details={"node": self._node_id, **_digest_of(note), **note.details},
        )
        try:
            self._waiting.put_nowait((uuid.uuid4().hex, event))
        except asyncio.QueueFull:
            log.error("audit_lost", what=note.what, subject=event.subject)

    async def send(self) -> None:
        """Send what was recorded, in order; ends only by cancellation."""
        while True:
            message_id, event = await self._waiting.get()
            await self._send(message_id, event)
            self._waiting.task_done()

    async def flush(self, timeout_ms: int) -> None:
        """Wait until everything is sent, at most `timeout_ms`; what is not is logged."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._waiting.join()
        except TimeoutError:
            log.error("audit_lost", count=self._waiting.qsize())

    async def _send(self, message_id: str, event: events_pb2.AuditEvent) -> None:
        while True:
            try:
                await self._bus.publish_durable(
                    subjects.audit(event.what), event.SerializeToString(), message_id=message_id
                )
                return
            except Unavailable as error:
                log.warning("audit_waits", what=event.what, reason=error.message)
                await self._clock.sleep_ms(RETRY_MS)
