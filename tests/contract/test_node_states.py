"""Node states over both buses, and `GrpcNodeLoader` against a real loader server: what operators see and command."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from roundhouse import subjects
from roundhouse.errors import CapacityExhausted, Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.grpc_edge import GrpcServer
from roundhouse.wire.v1 import loading_pb2, loading_pb2_grpc, vocabulary_pb2
from services.gateway.adapters.admin_nodes import ALIVE_MS, GrpcNodeLoader, HeardNodeStates
from services.gateway.adapters.node_states import NodeStateFeed
from services.gateway.operations.admin_ports import LoadCommand
from tests.fakes.clock import ManualClock
from tests.fakes.event_bus import FakeBus

VERSION = vocabulary_pb2.ModelVersion(model="chat", digest="sha256:aa")


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A bus, in memory or real."""
    if request.param == "memory":
        yield FakeBus()
        return
    real = await NatsBus.connect(request.getfixturevalue("nats_url"), name="test")
    yield real
    await real.close()


def state(node: str, *, incarnation: str = "1", sequence: int = 1) -> loading_pb2.NodeState:
    """What a loader says."""
    return loading_pb2.NodeState(node_id=node, incarnation=incarnation, sequence=sequence, accepting=True)


async def told(states: HeardNodeStates, wanted: list[tuple[str, int]]) -> None:
    """Wait until the nodes are these, with these sequence numbers."""
    async with asyncio.timeout(30):
        while [(one.node_id, one.sequence) for one in await states.all()] != wanted:  # noqa: ASYNC110 - another's turn
            await asyncio.sleep(0.01)


async def test_states_come_over_the_bus_in_order_of_their_numbers(bus: Any) -> None:
    """Newest by node, by node id; an older one that comes late, and what is no state, change nothing; silence ends."""
    clock = ManualClock()
    states, feed = HeardNodeStates(clock), NodeStateFeed()
    feed.listen(states.observe)
    await feed.start(bus)
    for said in (state("b", sequence=5), state("a"), state("b", sequence=4)):
        await bus.publish(subjects.node_state(said.node_id), said.SerializeToString())
    await bus.publish(subjects.node_state("c"), b"\xff\xff\xff")
    await told(states, [("a", 1), ("b", 5)])
    await bus.publish(subjects.node_state("b"), state("b", incarnation="2").SerializeToString())
    await told(states, [("a", 1), ("b", 1)])
    clock.advance(ALIVE_MS + 1)
    assert await states.all() == []
    await feed.stop()
    await feed.stop()


class Loader(loading_pb2_grpc.LoaderServicer):
    """A loader that takes one version, and has no room for others."""

    def __init__(self) -> None:
        self.deadlines_ms: list[int] = []

    async def EnsureLoaded(self, request: Any, context: Any) -> Any:
        """Progress twice, then done; or no room."""
        self.deadlines_ms.append(request.deadline_ms)
        if request.version.digest != VERSION.digest:
            raise CapacityExhausted("it does not fit now")
        for _ in range(2):
            yield loading_pb2.LoadProgress()

    async def EnsureUnloaded(self, request: Any, context: Any) -> Any:
        """It was loaded if it is the version."""
        return loading_pb2.EnsureUnloadedReply(was_loaded=request.version.digest == VERSION.digest)


@pytest.fixture
async def loader() -> AsyncIterator[tuple[str, Loader]]:
    """A loader's address and what it was asked."""
    server, service = GrpcServer(), Loader()  # type: ignore[abstract]  # the other calls are not made
    loading_pb2_grpc.add_LoaderServicer_to_server(service, server.server)  # type: ignore[no-untyped-call,unused-ignore]
    port = await server.start("127.0.0.1", 0, ["roundhouse.v1.Loader"])
    yield f"127.0.0.1:{port}", service
    await server.stop(0)


async def test_a_loader_is_commanded_over_grpc(loader: tuple[str, Loader]) -> None:
    """Done is done, refusals are ours again, and the deadline is told."""
    address, service = loader
    commands = GrpcNodeLoader()
    other = vocabulary_pb2.ModelVersion(model="chat", digest="sha256:bb")
    await commands.load(LoadCommand(address, VERSION), timeout_ms=5_000)
    assert service.deadlines_ms == [5_000]
    with pytest.raises(Unavailable, match="it does not fit now"):
        await commands.load(LoadCommand(address, other), timeout_ms=5_000)
    assert await commands.unload(LoadCommand(address, VERSION), timeout_ms=5_000)
    assert not await commands.unload(LoadCommand(address, other), timeout_ms=5_000)


async def test_a_loader_that_is_away_is_unavailable() -> None:
    """Nothing listens there."""
    with pytest.raises(Unavailable):
        await GrpcNodeLoader().load(LoadCommand("127.0.0.1:1", VERSION), timeout_ms=1_000)
