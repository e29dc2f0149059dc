"""What every `InferenceNode` promises: the real one over Triton, and the fake that stands in for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.packaging import EngineSpec
from roundhouse.errors import DeadlinePassed, EngineFailed, InvalidInput
from roundhouse.vocabulary import RequestId
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.triton_node import TritonNodes, engine_error
from services.gateway.domain.tensors import Tensor
from services.gateway.ports import EngineChunk, EngineRequest, InferenceNode, TensorRequest
from tests.builders.checkpoints import knob_model, random_checkpoint
from tests.fakes.inference_node import FakeNode
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer

REQUEST = EngineRequest(
    request_id=RequestId("r1"),
    text_input="hello",
    prompt_token_ids=(5, 6, 7, 8, 9),
    sampling_parameters='{"max_tokens":3}',
    phase="full",
    stream=True,
    salt="00" * 32,
    adapter_path="",
    adapter_digest="",
)
LONG = replace(REQUEST, sampling_parameters='{"max_tokens":10000}')


@pytest.fixture(scope="module")
def loaded(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """Triton with a quick model, a slow one, one that fails after two tokens and one that dies, and a real one."""
    root = tmp_path_factory.mktemp("models")
    server = EngineServer(triton.grpc_address, triton.log)
    for name, knobs in (
        ("quick", {}),
        ("slow", {"token_interval_ms": 20}),
        ("failing", {"error_after_tokens": 2}),
    ):
        folder = knob_model(root / name, **knobs)  # type: ignore[arg-type]  # keyword knobs
        server.load(EngineSpec("triton", name, str(folder)))
    checkpoint = random_checkpoint(root / "tiny")
    server.load(EngineSpec("reference", "tiny", str(checkpoint), kv_pool_tokens=256))
    intent = Path(__file__).resolve().parents[2] / "engines" / "onnx" / "intent" / "intent.onnx"
    server.load(EngineSpec("onnx", "intent", str(intent)))
    yield server
    server.client.close()


def at(model: str, address: str) -> Placement:
    """Where a model runs."""
    return Placement(node_id="node-1", triton_grpc_address=address, triton_model_name=model)


Place = Callable[[str], tuple[InferenceNode, Placement]]


@pytest.fixture(params=["fake", "triton"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """Gives the node and the placement of a model: quick, slow, failing."""
    if request.param == "fake":
        fakes = {
            "quick": FakeNode(),
            "slow": FakeNode(interval_ms=20),
            "failing": FakeNode(fail_after=2),
        }
        yield lambda model: (fakes[model], at(model, "127.0.0.1:1"))
        assert all(fake.open_streams == 0 for fake in fakes.values())
        return
    server: EngineServer = request.getfixturevalue("loaded")
    nodes = TritonNodes()
    yield lambda model: (nodes, at(model, server.address))
    await nodes.close()


async def collect(
    node: InferenceNode,
    placement: Placement,
    request: EngineRequest,
    seen: list[EngineChunk] | None = None,
    *,
    timeout_ms: int = 20_000,
) -> list[EngineChunk]:
    """Every chunk of a call, also in `seen` as they come."""
    chunks: list[EngineChunk] = [] if seen is None else seen
    async for chunk in node.generate(placement, request, timeout_ms=timeout_ms):
        chunks.append(chunk)
    return chunks


async def test_a_generation_counts_its_tokens_and_says_why_it_ended(place: Place) -> None:
    """Three tokens were asked for: the counts of the chunks add up to 3, only the last has a reason."""
    node, placement = place("quick")
    chunks = await collect(node, placement, REQUEST)
    assert sum(chunk.output_tokens for chunk in chunks) == 3
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert "".join(chunk.text for chunk in chunks).split() == ["tok0", "tok1", "tok2"]
    assert chunks[0].input_tokens == 5


async def test_an_embedding_comes_as_one_chunk_without_output_tokens(place: Place) -> None:
    """The vector, a finish, nothing generated."""
    node, placement = place("quick")
    [chunk] = await collect(node, placement, replace(REQUEST, phase="embed", sampling_parameters=""))
    assert chunk.embedding is not None
    assert len(chunk.embedding) > 0
    assert (chunk.output_tokens, chunk.finish_reason) == (0, "stop")


async def test_an_engine_that_fails_after_tokens_gives_them_first(place: Place) -> None:
    """Two tokens, then the failure, whose text is not the engine's."""
    node, placement = place("failing")
    seen: list[EngineChunk] = []
    with pytest.raises(EngineFailed) as raised:
        await collect(node, placement, REQUEST, seen)
    assert sum(chunk.output_tokens for chunk in seen) == 2
    assert "told to fail" not in raised.value.message


async def test_closing_the_iterator_ends_the_request(place: Place) -> None:
    """After a few of 10,000 tokens the reader leaves, and the next request is served at once."""
    node, placement = place("slow")
    stream = node.generate(placement, LONG, timeout_ms=60_000)
    await anext(stream)
    await stream.aclose()
    assert len(await collect(node, placement, REQUEST)) > 0


async def test_cancelling_the_reader_ends_the_request(place: Place) -> None:
    """A task that waits for the next chunk can be cancelled."""
    node, placement = place("slow")
    task = asyncio.create_task(collect(node, placement, LONG))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_request_leaves_the_instance(loaded: EngineServer) -> None:
    """Case B32: after closing, Triton holds nothing: the model unloads at once instead of 200 s later."""
    nodes = TritonNodes()
    stream = nodes.generate(at("slow", loaded.address), LONG, timeout_ms=60_000)
    await anext(stream)
    await stream.aclose()
    await nodes.close()
    async with asyncio.timeout(60):
        await asyncio.to_thread(loaded.unload, "slow")


async def test_a_deadline_ends_a_stream_that_would_go_on(loaded: EngineServer, tmp_path: Path) -> None:
    """With 200 ms for tokens every 100 ms, the stream ends as a passed deadline."""
    folder = knob_model(tmp_path / "slower", token_interval_ms=100)
    loaded.load(EngineSpec("triton", "slower", str(folder)))
    nodes = TritonNodes()
    with pytest.raises(DeadlinePassed):
        await collect(nodes, at("slower", loaded.address), LONG, timeout_ms=200)
    await nodes.close()


async def test_a_node_that_is_away_and_a_model_that_is_not_there_are_engine_failures(loaded: EngineServer) -> None:
    """Both can be tried again elsewhere."""
    nodes = TritonNodes()
    with pytest.raises(EngineFailed):
        await collect(nodes, at("quick", "127.0.0.1:1"), REQUEST)
    with pytest.raises(EngineFailed):
        await collect(nodes, at("no-such-model", loaded.address), REQUEST)
    await nodes.close()


async def test_what_the_engine_blames_on_the_caller_names_the_parameter(loaded: EngineServer) -> None:
    """The reference engine refuses a token that it does not have."""
    nodes = TritonNodes()
    wrong = replace(REQUEST, sampling_parameters='{"max_tokens":3,"logit_bias":{"999999":1}}')
    with pytest.raises(InvalidInput) as raised:
        await collect(nodes, at("tiny", loaded.address), wrong)
    assert raised.value.param == "logit_bias"
    too_long = replace(REQUEST, sampling_parameters='{"max_tokens":2000}')
    with pytest.raises(InvalidInput) as raised:
        await collect(nodes, at("tiny", loaded.address), too_long)
    assert raised.value.code == "context_length_exceeded"
    await nodes.close()


async def test_prompt_tokens_are_those_of_the_gateway_and_repetitions_are_equal(loaded: EngineServer) -> None:
    """The engine computes the ids it is given, not the text; temperature 0 answers alike twice."""
    nodes = TritonNodes()
    request = replace(REQUEST, sampling_parameters='{"max_tokens":6,"temperature":0}', return_logprobs=True)
    first = await collect(nodes, at("tiny", loaded.address), request)
    again = await collect(nodes, at("tiny", loaded.address), replace(request, text_input="other"))
    assert first[0].input_tokens == 5
    assert "".join(chunk.text for chunk in first) == "".join(chunk.text for chunk in again)
    assert all(chunk.logprobs for chunk in first)
    await nodes.close()


async def test_tensors_pass_through(loaded: EngineServer) -> None:
    """A classifier's outputs come back with their shapes; a wrong datatype is the caller's fault."""
    nodes = TritonNodes()
    metadata = loaded.client.get_model_metadata("intent")
    [spec] = metadata.inputs
    shape = tuple(abs(int(size)) for size in spec.shape)
    count = 1
    for size in shape:
        count *= size
    request = TensorRequest(RequestId("r"), (Tensor(spec.name, spec.datatype, shape, bytes(4 * count)),), ())
    reply = await nodes.infer(at("intent", loaded.address), request, timeout_ms=10_000)
    assert {tensor.name for tensor in reply.outputs} == {output.name for output in metadata.outputs}
    wrong = TensorRequest(RequestId("r"), (Tensor(spec.name, "INT32", shape, bytes(4 * count)),), ())
    with pytest.raises(InvalidInput):
        await nodes.infer(at("intent", loaded.address), wrong, timeout_ms=10_000)
    await nodes.close()


@pytest.mark.parametrize(
    ("text", "kind", "param", "code"),
    [
        ("invalid_request: stop: too many", InvalidInput, "stop", None),
        ("in model 'm': invalid_request: n: no", InvalidInput, "n", None),
        ("context_length_exceeded: 9 tokens", InvalidInput, None, "context_length_exceeded"),
        ("numeric_fault: nan", EngineFailed, None, "engine_error"),
        ("Request for unknown model: 'm' is not found", EngineFailed, None, "engine_error"),
    ],
)
def test_engine_texts(text: str, kind: type[Exception], param: str | None, code: str | None) -> None:
    """Texts of the contract reach the caller with their parameter; all others are ours."""
    error = engine_error(text, at("m", "127.0.0.1:1"))
    assert type(error) is kind
    assert (error.param, error.code) == (param, code)
