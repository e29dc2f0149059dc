"""`SchedulerGateway` over the bus, and the subscription that receives this gateway's grants.

Source: ARCHITECTURE.md, "NATS subjects".
"""

from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import AT_ONCE, EventBus, Message, Subscription
from roundhouse.wire.v1 import loading_pb2
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.adapters.node_states import NodeStateFeed
from services.gateway.operations.attempts import Attempts


class BusScheduler:
    """See `SchedulerGateway`."""

    def __init__(self, bus: EventBus, gateway_id: str, clock: Clock) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._clock = clock

    async def submit(self, request: wire.SubmitRequest, *, timeout_ms: int, to_all: bool = False) -> wire.SubmitReply:
        """See `SchedulerGateway.submit`. Raises Unavailable also for an empty or unreadable reply."""
        subject = subjects.WORK_SUBMIT_TO_ALL if to_all else subjects.WORK_SUBMIT
        data = await self._bus.request(subject, request.SerializeToString(), timeout_ms=timeout_ms)
        try:
            reply = wire.SubmitReply.FromString(data)
        except DecodeError as error:
            raise Unavailable("the scheduler's reply cannot be read") from error
        if reply.WhichOneof("result") is None:
            raise Unavailable("the scheduler did not decide")
        return reply

    async def cancel(self, cancel: wire.Cancel) -> None:
        """See `SchedulerGateway.cancel`."""
        await self._bus.publish(subjects.WORK_CANCEL, cancel.SerializeToString())

    async def finished(self, finished: wire.Finished) -> None:
        """See `SchedulerGateway.finished`."""
        await self._bus.publish(subjects.WORK_FINISHED, finished.SerializeToString())

    async def lost(self, node_id: str) -> None:
        """See `SchedulerGateway.lost`."""
        now_ms = self._clock.now_ms()
        lost = loading_pb2.NodeLost(node_id=node_id, gateway_id=self._gateway_id, sent_unix_ms=now_ms)
        await self._bus.publish(subjects.node_lost(node_id), lost.SerializeToString())

    async def heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        """See `SchedulerGateway.heartbeat`."""
        await self._bus.publish(subjects.WORK_HEARTBEAT, heartbeat.SerializeToString())


async def receive_grants(bus: EventBus, gateway_id: str, attempts: Attempts) -> Subscription:
    """Deliver the grants and rejections for this gateway, and answer whether they are wanted."""

    async def on_delivery(message: Message) -> bytes:
        wanted = attempts.deliver(wire.GrantDelivery.FromString(message.data))
        return wire.GrantAck(wanted=wanted).SerializeToString()

    return await bus.subscribe(subjects.gateway_grant(gateway_id), on_delivery, concurrency=AT_ONCE)


def leave_emptied_nodes(nodes: NodeStateFeed, attempts: Attempts) -> None:
    """Have streams leave nodes that are in maintenance, as soon as their loaders say so, and each time they say it."""

    def on_state(state: loading_pb2.NodeState) -> None:
        if state.emptying:
            attempts.leave(state.node_id)

    nodes.listen(on_state)
