"""A request with an adapter: its node's loader is asked where it lies before the engine is."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest

from roundhouse.errors import EngineFailed, InvalidInput, Unavailable
from roundhouse.vocabulary import RequestId, TenantId
from roundhouse.wire.v1 import loading_pb2
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.adapter_places import LoaderAdapters
from services.gateway.operations.adapter_placing import AdapterPlacing
from services.gateway.ports import EngineChunk, EngineRequest, FoundAdapter
from tests.fakes.clock import ManualClock
from tests.fakes.inference_node import FakeNode

ONE = Placement(node_id="n1", triton_model_name="m--1", loader_address="127.0.0.1:1")
TWO = Placement(node_id="n2", triton_model_name="m--1", loader_address="127.0.0.1:2")
PLAIN = EngineRequest(
    request_id=RequestId("r1"),
    text_input="hello",
    prompt_token_ids=(1, 2),
    sampling_parameters='{"max_tokens": 2}',
    phase="full",
    stream=True,
    salt="00",
    adapter_path="",
    adapter_digest="",
    tenant_id=TenantId("acme"),
)
TUNED = replace(PLAIN, adapter_digest="sha256:1", adapter_name="tuned")


@dataclass
class FakePlaces:
    """`AdapterPlaces` that names a folder of the node, or raises."""

    error: Exception | None = None
    engine_name: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def find(self, placement: Placement, request: EngineRequest, *, timeout_ms: int) -> FoundAdapter:
        """See `AdapterPlaces.find`."""
        self.asked.append((placement.node_id, request.adapter_name))
        if self.error is not None:
            raise self.error
        return FoundAdapter(f"/{placement.node_id}/{request.adapter_name}", self.engine_name)

    def forget(self, placement: Placement, request: EngineRequest) -> None:
        """See `AdapterPlaces.forget`."""
        self.forgotten.append(placement.node_id)


async def produced(node: AdapterPlacing, placement: Placement, request: EngineRequest) -> list[EngineChunk]:
    """Every chunk."""
    return [chunk async for chunk in node.generate(placement, request, timeout_ms=1_000)]


async def test_the_engine_is_told_the_nodes_own_path() -> None:
    """Each node has its own; a request without an adapter asks nobody."""
    inner, places = FakeNode(), FakePlaces()
    node = AdapterPlacing(inner, places)
    for placement, request in ((ONE, TUNED), (TWO, TUNED), (ONE, PLAIN)):
        assert await produced(node, placement, request)
    assert [call.adapter_path for call in inner.calls if isinstance(call, EngineRequest)] == [
        "/n1/tuned",
        "/n2/tuned",
        "",
    ]
    assert places.asked == [("n1", "tuned"), ("n2", "tuned")]


async def test_vllm_is_told_the_name_that_it_knows() -> None:
    """As `lora_name`, beside the other parameters; an engine that opens paths gets the parameters as they were."""
    inner = FakeNode()
    for name in ("", "ab-7"):
        assert await produced(AdapterPlacing(inner, FakePlaces(engine_name=name)), ONE, TUNED)
    told = [call.sampling_parameters for call in inner.calls if isinstance(call, EngineRequest)]
    assert told[0] == TUNED.sampling_parameters
    assert json.loads(told[1]) == {"max_tokens": 2, "lora_name": "ab-7"}


async def test_a_misfit_never_reaches_the_engine() -> None:
    """What the loader says is what the caller hears."""
    inner = FakeNode()
    node = AdapterPlacing(inner, FakePlaces(error=InvalidInput("r must be in [1, 64]")))
    with pytest.raises(InvalidInput, match="r must be"):
        await produced(node, ONE, TUNED)
    assert inner.calls == []


async def test_a_place_that_did_not_help_is_forgotten() -> None:
    """An engine that failed with it may not have found it: the next attempt asks anew."""
    inner, places = FakeNode(fail_after=0), FakePlaces()
    with pytest.raises(EngineFailed):
        await produced(AdapterPlacing(inner, places), ONE, TUNED)
    assert places.forgotten == ["n1"]


class FailedCall(grpc.aio.AioRpcError):
    """A status with a text."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class AnsweringLoaders(LoaderAdapters):
    """The real table over loaders that answer what the test says."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked: list[loading_pb2.EnsureAdapterRequest] = []
        self.refusal: FailedCall | None = None

    @contextmanager
    def refusing(self, code: grpc.StatusCode, details: str) -> Iterator[None]:
        """Refuse meanwhile."""
        self.refusal = FailedCall(code, details)
        yield
        self.refusal = None

    async def _call(
        self, placement: Placement, message: loading_pb2.EnsureAdapterRequest, timeout_s: float
    ) -> loading_pb2.EnsureAdapterReply:
        self.asked.append(message)
        if self.refusal is not None:
            raise self.refusal
        return loading_pb2.EnsureAdapterReply(path="/shelf/1", keep_ms=10_000, engine_name="ab-1")


async def test_a_place_is_remembered_for_half_the_time_that_it_is_kept() -> None:
    """Kept for 10 s: asked again after 5. For another tenant, another node, and after `forget` it is asked at once."""
    clock = ManualClock()
    loaders = AnsweringLoaders(clock)
    other = replace(TUNED, tenant_id=TenantId("globex"))
    for placement, request, asked in ((ONE, TUNED, 1), (ONE, TUNED, 1), (TWO, TUNED, 2), (ONE, other, 3)):
        assert await loaders.find(placement, request, timeout_ms=60_000) == FoundAdapter("/shelf/1", "ab-1")
        assert len(loaders.asked) == asked
    first = loaders.asked[0]
    assert (first.adapter, first.digest, first.tenant_id) == ("tuned", "sha256:1", "acme")
    assert (first.triton_model_name, first.deadline_ms, first.use_ms) == ("m--1", 30_000, 70_000)
    loaders.forget(ONE, TUNED)
    await loaders.find(ONE, TUNED, timeout_ms=1_000)
    assert len(loaders.asked) == 4
    clock.advance(5_000)
    await loaders.find(ONE, TUNED, timeout_ms=1_000)
    assert len(loaders.asked) == 5


async def test_a_place_is_asked_for_again_for_a_request_that_may_run_longer() -> None:
    """Asked at 0 s for 60 s and 10 more: a request at 4 s of 60 s ends before 70 s, one of 67 s does not."""
    clock = ManualClock()
    loaders = AnsweringLoaders(clock)
    for wait_ms, timeout_ms, asked in ((0, 60_000, 1), (4_000, 60_000, 1), (0, 67_000, 2), (0, 77_000, 2)):
        clock.advance(wait_ms)
        await loaders.find(ONE, TUNED, timeout_ms=timeout_ms)
        assert len(loaders.asked) == asked
    assert [each.use_ms for each in loaders.asked] == [70_000, 77_000]


async def test_what_a_loader_refuses() -> None:
    """A misfit is the adapter's fault and names it; what has gone meanwhile is worth another attempt elsewhere."""
    loaders = AnsweringLoaders(ManualClock())
    with loaders.refusing(grpc.StatusCode.INVALID_ARGUMENT, "lora_A is [4, 64], not [4, 32]"):
        with pytest.raises(InvalidInput, match=r"'tuned' cannot be used: lora_A is \[4, 64\]") as misfit:
            await loaders.find(ONE, TUNED, timeout_ms=1_000)
        assert (misfit.value.code, misfit.value.param) == ("adapter_invalid", "model")
    for code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
        with loaders.refusing(code, "gone"), pytest.raises(Unavailable):
            await loaders.find(ONE, TUNED, timeout_ms=1_000)
    with pytest.raises(Unavailable, match="no loader"):
        await loaders.find(Placement(node_id="n3"), TUNED, timeout_ms=1_000)


async def test_a_loader_that_is_not_there() -> None:
    """Nobody listens: unavailable, soon, and the next attempt may go elsewhere."""
    loaders = LoaderAdapters(ManualClock())
    try:
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable):
                await loaders.find(ONE, TUNED, timeout_ms=1_000)
    finally:
        await loaders.close()
