"""`SchedulerGateway` in memory: accepts or refuses as told, and grants at once or when the test says so."""

import asyncio
from dataclasses import dataclass, field

from roundhouse.errors import Unavailable
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.attempts import Attempts

PLACEMENT = wire.Placement(node_id="node-1", triton_grpc_address="127.0.0.1:1", triton_model_name="m--0123456789ab")


@dataclass
class FakeScheduler:
    """Grants through `attempts`, as the subscription does. `away` makes every call raise Unavailable."""

    attempts: Attempts
    grants_at_once: bool = True
    placements: list[wire.Placement] = field(default_factory=lambda: [PLACEMENT])
    refused: wire.Refused | None = None
    accepted: wire.Accepted = field(default_factory=lambda: wire.Accepted(position=2, estimated_wait_ms=3_000))
    away: bool = False
    submitted: list[wire.SubmitRequest] = field(default_factory=list)
    cancelled: list[wire.Cancel] = field(default_factory=list)
    finishes: list[wire.Finished] = field(default_factory=list)
    heartbeats: list[wire.Heartbeat] = field(default_factory=list)
    nodes_lost: list[str] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)

    async def submit(self, request: wire.SubmitRequest, *, timeout_ms: int, to_all: bool = False) -> wire.SubmitReply:
        """See `SchedulerGateway.submit`."""
        self._check()
        self.submitted.append(request)
        if self.refused is not None:
            return wire.SubmitReply(refused=self.refused)
        if self.grants_at_once:
            asyncio.get_running_loop().call_soon(self.grant, request)
        return wire.SubmitReply(accepted=self.accepted)

    def grant(self, request: wire.SubmitRequest) -> bool:
        """Grant a submitted request; returns whether it was wanted."""
        grant = wire.Grant(
            request_id=request.request_id,
            attempt=request.attempt,
            lease_id=f"lease-{request.request_id}-{request.attempt}",
            placements=self.placements,
            queue_ms=7,
            stage_ms=5,
            load_ms=3,
        )
        self.wanted.append(self.attempts.deliver(wire.GrantDelivery(grant=grant)))
        return self.wanted[-1]

    def reject(self, request: wire.SubmitRequest, refused: wire.Refused) -> bool:
        """Give a queued request back; returns whether it was wanted."""
        rejection = wire.Rejection(request_id=request.request_id, attempt=request.attempt, refused=refused)
        return self.attempts.deliver(wire.GrantDelivery(rejection=rejection))

    async def cancel(self, cancel: wire.Cancel) -> None:
        """See `SchedulerGateway.cancel`."""
        self._check()
        self.cancelled.append(cancel)

    async def finished(self, finished: wire.Finished) -> None:
        """See `SchedulerGateway.finished`."""
        self._check()
        self.finishes.append(finished)

    async def lost(self, node_id: str) -> None:
        """See `SchedulerGateway.lost`."""
        self._check()
        self.nodes_lost.append(node_id)

    async def heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        """See `SchedulerGateway.heartbeat`."""
        self._check()
        self.heartbeats.append(heartbeat)

    def _check(self) -> None:
        if self.away:
            raise Unavailable("no scheduler answers")
