"""A scheduler on a real bus that accepts everything and grants one placement, at once or when the test says so."""

import asyncio
from dataclasses import dataclass, field

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus, Message, Subscription
from roundhouse.wire.v1 import loading_pb2
from roundhouse.wire.v1 import scheduling_pb2 as wire


@dataclass
class BusScheduler:
    """`start` it on a connected bus; grants are sent as requests and their acknowledgements kept."""

    bus: EventBus
    placement: wire.Placement
    grants_at_once: bool = True
    refused: wire.Refused | None = None
    fallbacks: dict[str, wire.Redirected] = field(default_factory=dict)  # by model, where the request allows it
    accepted: wire.Accepted = field(default_factory=lambda: wire.Accepted(position=0, estimated_wait_ms=500))
    submitted: list[wire.SubmitRequest] = field(default_factory=list)
    cancelled: list[wire.Cancel] = field(default_factory=list)
    finishes: list[wire.Finished] = field(default_factory=list)
    heartbeats: list[wire.Heartbeat] = field(default_factory=list)
    nodes_lost: list[str] = field(default_factory=list)
    acknowledged: list[bool] = field(default_factory=list)
    _running: list[Subscription] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Listen to gateways."""
        group = subjects.SCHEDULER_GROUP
        self._running = [
            await self.bus.subscribe(subjects.WORK_SUBMIT, self._on_submit, group=group, concurrency=64),
            await self.bus.subscribe(subjects.WORK_CANCEL, self._on_cancel, group=group),
            await self.bus.subscribe(subjects.WORK_FINISHED, self._on_finished, group=group),
            await self.bus.subscribe(subjects.WORK_HEARTBEAT, self._on_heartbeat, group=group),
            await self.bus.subscribe(subjects.NODES_LOST, self._on_node_lost),
        ]

    async def stop(self) -> None:
        """Fall silent, as a scheduler that is away."""
        for subscription in self._running:
            await subscription.stop()
        self._running = []

    async def grant(self, request: wire.SubmitRequest) -> bool:
        """Grant a request; returns whether it was wanted."""
        grant = wire.Grant(
            request_id=request.request_id,
            attempt=request.attempt,
            lease_id=f"lease-{request.request_id}",
            placements=[self.placement],
            queue_ms=1,
        )
        data = wire.GrantDelivery(grant=grant).SerializeToString()
        try:
            reply = await self.bus.request(subjects.gateway_grant(request.gateway_id), data)
        except Unavailable:
            return False
        self.acknowledged.append(wire.GrantAck.FromString(reply).wanted)
        return self.acknowledged[-1]

    async def _on_submit(self, message: Message) -> bytes:
        request = wire.SubmitRequest.FromString(message.data)
        self.submitted.append(request)
        if self.refused is not None:
            return wire.SubmitReply(refused=self.refused).SerializeToString()
        if request.fallback_allowed and request.model in self.fallbacks:
            return wire.SubmitReply(redirected=self.fallbacks[request.model]).SerializeToString()
        if self.grants_at_once:
            task = asyncio.create_task(self._grant_soon(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return wire.SubmitReply(accepted=self.accepted).SerializeToString()

    async def _grant_soon(self, request: wire.SubmitRequest) -> None:
        await self.grant(request)

    async def _on_cancel(self, message: Message) -> None:
        self.cancelled.append(wire.Cancel.FromString(message.data))

    async def _on_node_lost(self, message: Message) -> None:
        self.nodes_lost.append(loading_pb2.NodeLost.FromString(message.data).node_id)

    async def _on_finished(self, message: Message) -> None:
        self.finishes.append(wire.Finished.FromString(message.data))

    async def _on_heartbeat(self, message: Message) -> None:
        self.heartbeats.append(wire.Heartbeat.FromString(message.data))
