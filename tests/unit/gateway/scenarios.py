"""Runs requests on virtual time over fakes, and what a test wants to know afterwards."""

from collections.abc import Awaitable, Callable

from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from services.gateway.operations.accounting import Work
from services.gateway.operations.run import RunEvent
from services.gateway.operations.run_request import run_request
from tests.fakes.clock import run_virtual
from tests.unit.gateway.gateway_world import T1, GatewayWorld


def in_world(scenario: Callable[[GatewayWorld], Awaitable[None]]) -> GatewayWorld:
    """Run a scenario on virtual time; afterwards nothing may be held anywhere."""
    held: list[GatewayWorld] = []

    async def run() -> None:
        world = GatewayWorld()
        held.append(world)
        await world.prepare()
        await scenario(world)
        assert len(world.attempts) == 0
        assert world.node.open_streams == 0
        assert world.observer.waiting == 0
        assert world.observer.starts == len(world.observer.endings)
        assert world.admission.running(T1) == 0

    run_virtual(run())
    return held[0]


async def collect(world: GatewayWorld, work: Work | None = None, **wishes: int) -> list[RunEvent]:
    """Run a request to its end."""
    events: list[RunEvent] = []
    async with run_request(world.parts, work or world.work(**wishes)) as run:  # type: ignore[arg-type]  # all int
        async for event in run.events():
            events.append(event)
    return events


def the_event(world: GatewayWorld) -> UsageEvent:
    """The only usage event there is."""
    assert len(world.usage.recorded) == 1
    return world.usage.recorded[0]


def billed(event: UsageEvent) -> tuple[Outcome, int, int]:
    """Outcome, input and output tokens."""
    return Outcome.from_wire(event.data.outcome), event.data.input_tokens, event.data.output_tokens
