"""Messages of a language-model instance, read together."""

import json
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as kserve

from roundhouse.errors import EngineFailed
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.adapters.triton_chunks import HEADS_MAX, ChunkReading, KnownHeads
from services.gateway.adapters.triton_node import engine_error
from services.gateway.adapters.triton_tensors import chunk_of
from services.gateway.ports import InstanceBroken


def message(
    text: str, *, tokens: int = 1, finish: str = "null", logprobs: str = "", name: str = "m", **more: str
) -> bytes:
    """One message as an engine sends it."""
    response = kserve.ModelInferResponse(model_name="m", model_version="1", id="r1")
    texts = {"text_output": text, "finish_reason": finish, **({"logprobs": logprobs} if logprobs else {}), **more}
    for output, value in texts.items():
        response.outputs.add(name=output, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(value.encode()).to_bytes(4, "little") + value.encode())
    response.outputs.add(name="num_output_tokens", datatype="UINT32", shape=[1])
    response.raw_output_contents.append(tokens.to_bytes(4, "little"))
    return bytes(kserve.ModelStreamInferResponse(infer_response=response).SerializeToString())


def test_messages_that_came_together_are_one_chunk() -> None:
    """Three tokens: their texts joined, their counts added, the reason of the last, the cache count of the first."""
    reading = ChunkReading()
    first = message("Hä", roundhouse='{"cached_tokens":4}')
    chunk, error = reading.chunk([first, message("llo"), message("!" * 300, tokens=2, finish="stop")])
    assert chunk is not None
    assert (chunk.text, chunk.output_tokens, chunk.finish_reason) == ("Hällo" + "!" * 300, 4, "stop")
    assert (chunk.cached_tokens, error) == (4, "")


@pytest.mark.parametrize("unfinished", ["null", "None", ""])
def test_an_answer_ends_once_whatever_an_engine_says_before(unfinished: str) -> None:
    """Triton's vLLM backend writes Python's None before the last response, our engine JSON's null: neither ends it."""
    reading = ChunkReading()
    for text in ("a", "b"):
        chunk, _ = reading.chunk([message(text, finish=unfinished)])
        assert chunk is not None
        assert chunk.finish_reason is None
    chunk, _ = reading.chunk([message("c", finish=unfinished), message("", tokens=0, finish="length")])
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason) == ("c", "length")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Stub process 'm--1_0_0' is not healthy.", InstanceBroken),
        (
            "Error generating stream: EngineCore encountered an issue. See stack trace (above) for the ...",
            InstanceBroken,
        ),
        ("LoRA ab-1 is not supported, we currently support ['cd-0', 'cd-1']", EngineFailed),
    ],
)
def test_a_dead_engine_is_told_from_one_that_failed(text: str, kind: type[EngineFailed]) -> None:
    """Triton's words, and vLLM's behind its backend: such an instance is unloaded. No caller sees their words."""
    error = engine_error(text, Placement(node_id="n1", triton_model_name="m--1"))
    assert type(error) is kind
    assert error.message.startswith("The engine")


def test_the_short_way_reads_what_protobuf_reads() -> None:
    """For texts of 0 to 20,000 bytes (lengths of one to three bytes), each read alone after a first one."""
    reading = ChunkReading()
    reading.chunk([message("first")])
    for size in (0, 1, 127, 128, 255, 16_383, 16_384, 20_000):
        data = message("ä" * (size // 2), tokens=size)
        expected = chunk_of(kserve.ModelStreamInferResponse.FromString(data).infer_response)
        assert reading.chunk([data]) == (expected, "")


def test_a_message_of_another_shape_goes_through_protobuf() -> None:
    """The last message has one output more: nothing of it is lost."""
    reading = ChunkReading()
    reading.chunk([message("a")])
    chunk, _ = reading.chunk([message("b", finish="length", roundhouse='{"cached_tokens":2}')])
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason, chunk.cached_tokens) == ("b", "length", 2)


def test_tokens_before_an_error_are_given_with_it() -> None:
    """Case B29: two tokens came together with the failure."""
    failed = kserve.ModelStreamInferResponse(error_message="boom").SerializeToString()
    chunk, error = ChunkReading().chunk([message("a"), message("b"), failed])
    assert chunk is not None
    assert (chunk.text, chunk.output_tokens, error) == ("ab", 2, "boom")


def test_logprobs_of_several_are_one_list() -> None:
    """Lists are joined in order; an empty one adds nothing."""
    reading = ChunkReading()
    parts = [
        message("a", logprobs='[{"id":1}]'),
        message("", logprobs="[]"),
        message("b", logprobs='[{"id":2}, {"id":3}]'),
    ]
    chunk, _ = reading.chunk(parts)
    assert chunk is not None
    assert chunk.logprobs is not None
    assert [entry["id"] for entry in json.loads(chunk.logprobs)] == [1, 2, 3]


def test_the_mark_of_the_end_is_no_chunk() -> None:
    """Triton's empty final response."""
    end = kserve.ModelStreamInferResponse(infer_response=kserve.ModelInferResponse(model_name="m"))
    assert ChunkReading().chunk([end.SerializeToString()]) == (None, "")


def with_id(text: str, request_id: str) -> bytes:
    """A message whose head names the request, as Triton's does."""
    parsed = kserve.ModelStreamInferResponse.FromString(message(text))
    parsed.infer_response.id = request_id
    return bytes(parsed.SerializeToString())


def test_what_one_stream_learnt_of_a_model_helps_the_next_one_whatever_its_id() -> None:
    """Two ids: the second stream reads its messages as protobuf would, and one of the first's as well."""
    known = KnownHeads()
    first, second = "a" * 32, "b" * 32
    ChunkReading(first, known).chunk([with_id("x", first), with_id("y", first)])
    reading = ChunkReading(second, known)
    for data in (with_id("hello", second), with_id("ä" * 90, second), with_id("", second), with_id("z", first)):
        expected = chunk_of(kserve.ModelStreamInferResponse.FromString(data).infer_response)
        assert reading.chunk([data]) == (expected, "")


def test_texts_in_a_row_are_joined_and_counted_and_nothing_else_is_taken_for_one() -> None:
    """After three that only add text: one with other counts, one with a reason, one with log probabilities."""
    reading = ChunkReading()
    rows = [message("a"), message("b"), message("c"), message("d", tokens=7), message("e", finish="stop")]
    chunk, _ = reading.chunk(rows)
    assert chunk is not None
    assert (chunk.text, chunk.output_tokens, chunk.finish_reason) == ("abcde", 11, "stop")
    chunk, _ = reading.chunk([message("f"), message("g", logprobs="[1]")])
    assert chunk is not None
    assert (chunk.text, chunk.output_tokens, chunk.logprobs) == ("fg", 2, "[1]")


def test_what_is_known_of_a_model_is_bounded() -> None:
    """A model whose every message looks different is read all the same."""
    known = KnownHeads()
    for number in range(3 * HEADS_MAX):
        extra: dict[str, Any] = {f"output_{number}": "x"}
        chunk, _ = ChunkReading("c" * 32, known).chunk([message("t", **extra)])
        assert chunk is not None
        assert chunk.text == "t"
    assert len(known.of(b"d" * 32)) == HEADS_MAX
