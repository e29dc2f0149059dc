"""The scheduler on the bus: what it answers and hears, what it sends to gateways and to metering.

Source: ARCHITECTURE.md, "NATS subjects". A message that cannot be read is logged and dropped: repeating it would not
help.
"""

import structlog
from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus, Message, Subscription
from roundhouse.vocabulary import GatewayId, NodeId
from roundhouse.wire.v1 import kv_pb2, loading_pb2, usage_pb2
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.scheduler.operations.blocks import BlockFollower
from services.scheduler.operations.completion import Completion
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.operations.submit import Submission
from services.scheduler.operations.waits import WaitBook

log = structlog.get_logger(__name__)

HANDLERS = 64  # messages of one subject handled at once: enough to keep the store's connections busy
GRANT_TIMEOUT_MS = 450  # below `Policy.retry_ms`, so that one delivery ends before the next begins


class BusGatewayLink:
    """`GatewayLink` over the bus."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def deliver(self, gateway_id: GatewayId, what: wire.GrantDelivery) -> wire.GrantAck:
        """See `GatewayLink.deliver`."""
        subject = subjects.gateway_grant(gateway_id)
        answer = await self._bus.request(subject, what.SerializeToString(), timeout_ms=GRANT_TIMEOUT_MS)
        try:
            return wire.GrantAck.FromString(answer)
        except DecodeError as error:
            raise Unavailable("the gateway's answer cannot be read") from error


class BusUsageOutlet:
    """`UsageOutlet` over the USAGE stream."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def publish(self, event: usage_pb2.UsageEvent) -> None:
        """See `UsageOutlet.publish`."""
        await self._bus.publish_durable(
            subjects.usage(event.subject), event.SerializeToString(), message_id=f"{event.source}/{event.id}"
        )


class BusHandlers:
    """Subscriptions of one scheduler replica; replicas share the work messages and all hear node states."""

    def __init__(
        self,
        bus: EventBus,
        submission: Submission,
        completion: Completion,
        nodes: NodeRegistry,
        blocks: BlockFollower,
        waits: WaitBook,
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._blocks = blocks
        self._waits = waits
        self._clock = clock
        self._submission = submission
        self._completion = completion
        self._nodes = nodes

    async def subscribe(self) -> list[Subscription]:
        """Begin to listen. Stop each subscription to drain."""
        shared = {
            subjects.WORK_SUBMIT: self._on_submit,
            subjects.WORK_CANCEL: self._on_cancel,
            subjects.WORK_FINISHED: self._on_finished,
            subjects.WORK_HEARTBEAT: self._on_heartbeat,
            subjects.WORK_EXPLAIN: self._on_explain,
        }
        subscriptions = [
            await self._bus.subscribe(subjects.NODE_STATES, self._on_node_state),
            await self._bus.subscribe(subjects.NODES_LOST, self._on_node_lost),
            await self._bus.subscribe(subjects.KV_BLOCKS, self._on_blocks),
            await self._bus.subscribe(subjects.WORK_SUBMIT_TO_ALL, self._on_submit, concurrency=HANDLERS),
        ]
        for subject, handler in shared.items():
            subscriptions.append(
                await self._bus.subscribe(subject, handler, group=subjects.SCHEDULER_GROUP, concurrency=HANDLERS)
            )
        return subscriptions

    async def _on_submit(self, message: Message) -> bytes | None:
        try:
            request = wire.SubmitRequest.FromString(message.data)
        except DecodeError:
            _log_unreadable(message)
            return None
        return (await self._submission.submit(request)).SerializeToString()

    async def _on_cancel(self, message: Message) -> bytes | None:
        try:
            await self._completion.cancelled(wire.Cancel.FromString(message.data))
        except DecodeError:
            _log_unreadable(message)
            return None
        except Unavailable as error:
            log.warning("cancel_lost", reason=error.message)  # its deadline ends it instead
        return None

    async def _on_finished(self, message: Message) -> bytes | None:
        try:
            await self._completion.finished([wire.Finished.FromString(message.data)])
        except DecodeError:
            _log_unreadable(message)
            return None
        except Unavailable as error:
            log.warning("finish_waits", reason=error.message)  # the next heartbeats repeat it
        return None

    async def _on_heartbeat(self, message: Message) -> bytes | None:
        try:
            await self._completion.heartbeat(wire.Heartbeat.FromString(message.data))
        except DecodeError:
            _log_unreadable(message)
            return None
        except Unavailable as error:
            log.warning("heartbeat_lost", reason=error.message)
        return None

    async def _on_blocks(self, message: Message) -> bytes | None:
        try:
            self._blocks.observe(kv_pb2.BlockEvents.FromString(message.data))
        except DecodeError:
            _log_unreadable(message)
        return None

    async def _on_explain(self, message: Message) -> bytes | None:
        try:
            request = wire.ExplainRequest.FromString(message.data)
        except DecodeError:
            _log_unreadable(message)
            return None
        return self._waits.explain(request, self._clock.now_ms()).SerializeToString()

    async def _on_node_lost(self, message: Message) -> bytes | None:
        try:
            self._nodes.lost(NodeId(loading_pb2.NodeLost.FromString(message.data).node_id))
        except DecodeError:
            _log_unreadable(message)
        return None

    async def _on_node_state(self, message: Message) -> bytes | None:
        try:
            self._nodes.observe(loading_pb2.NodeState.FromString(message.data))
        except DecodeError:
            _log_unreadable(message)
            return None
        return None


def _log_unreadable(message: Message) -> None:
    log.error("message_unreadable", subject=".".join(message.subject.split(".")[:3]))
