"""The last states of nodes from the JetStream bucket, so that a new replica need not wait for the next ones."""

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from roundhouse import subjects
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import loading_pb2

log = structlog.get_logger(__name__)


async def stored_states(bus: NatsBus) -> list[loading_pb2.NodeState]:
    """What the bucket holds; empty if it is missing or away, because nodes speak every second anyway."""
    try:
        bucket = await bus.jetstream.key_value(subjects.NODES_BUCKET)
        entries = [await bucket.get(key) for key in await bucket.keys()]
    except (NatsError, JetStreamError, TimeoutError) as error:
        log.info("no_stored_nodes", reason=type(error).__name__)
        return []
    return [loading_pb2.NodeState.FromString(entry.value) for entry in entries if entry.value]
