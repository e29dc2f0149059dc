"""A node without a model, as a process: `python -m benchmarks.fake_node FILE`.

It speaks what gateways use of Triton (KServe v2, `ModelStreamInfer`) on a real gRPC server, and says over the bus once
a second that its models are ready, as a loader would. A model whose name begins with `hold` gives one token and then
nothing until its caller leaves; every other one gives as many as `max_tokens` says, one message each, with no delay.
The answers are encoded once: what is measured is whoever reads them. FILE is JSON: nats_url, port, models
{name: digest}, slots, narrow (models with one slot).
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from tritonclient.grpc import service_pb2 as kserve

from roundhouse import subjects
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2

NODE_ID = "fake-node"
TELL_S = 1.0  # as a loader does
DEVICE_BYTES = 1 << 30


def triton_model_name(name: str, digest: str) -> str:
    """The name that the contract gives a version."""
    return f"{subjects.encode_token(name)}--{digest.removeprefix('sha256:')[:12]}"


def token_message(number: int, finish: str, cached: str) -> bytes:
    """One token, encoded. `cached` goes with the first and the last, as in the contract."""
    response = kserve.ModelInferResponse(model_name="m", model_version="1")
    texts = {"text_output": f"tok{number} ", "finish_reason": finish}
    counts = {"num_input_tokens": 3, "num_output_tokens": 1}
    for name, value in counts.items():
        response.outputs.add(name=name, datatype="UINT32", shape=[1])
        response.raw_output_contents.append(value.to_bytes(4, "little"))
    if cached:
        texts["roundhouse"] = cached
    for name, text in texts.items():
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(text.encode()).to_bytes(4, "little") + text.encode())
    return bytes(kserve.ModelStreamInferResponse(infer_response=response).SerializeToString())


FIRST = token_message(0, "null", '{"cached_tokens":0}')


def encoded_answer(tokens: int) -> list[bytes]:
    """All messages of an answer of `tokens` tokens."""
    middle = [token_message(number, "null", "") for number in range(1, tokens - 1)]
    return [FIRST, *middle, token_message(tokens - 1, "length", '{"cached_tokens":0}')]


class FakeTriton(grpc.GenericRpcHandler):  # type: ignore[misc,unused-ignore]  # untyped base in some releases
    """`ModelStreamInfer` and nothing else."""

    def __init__(self) -> None:
        self._answers: dict[int, list[bytes]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None for those that are not here."""
        if handler_call_details.method != "/inference.GRPCInferenceService/ModelStreamInfer":
            return None
        return grpc.stream_stream_rpc_method_handler(self._stream, kserve.ModelInferRequest.FromString, None)

    async def _stream(self, requests: AsyncIterator[kserve.ModelInferRequest], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            inputs = {one.name: place for place, one in enumerate(request.inputs)}
            parameters = json.loads(request.raw_input_contents[inputs["sampling_parameters"]][4:])
            if request.model_name.startswith("hold"):
                yield FIRST
                await asyncio.Event().wait()
            tokens = int(parameters["max_tokens"])
            if tokens not in self._answers:
                self._answers[tokens] = encoded_answer(tokens)
            for message in self._answers[tokens]:
                yield message


def node_state(options: dict[str, Any], sequence: int) -> loading_pb2.NodeState:
    """What a loader with these models loaded says."""
    now_ms = time.time_ns() // 1_000_000
    instances = [
        loading_pb2.Instance(
            version=vocabulary_pb2.ModelVersion(model=name, digest=digest),
            state=vocabulary_pb2.INSTANCE_STATE_READY,
            triton_model_name=triton_model_name(name, digest),
            generation=1,
            device_bytes=1 << 20,
            state_since_unix_ms=now_ms,
            slots=1 if name in options["narrow"] else options["slots"],
        )
        for name, digest in options["models"].items()
    ]
    return loading_pb2.NodeState(
        node_id=NODE_ID,
        sequence=sequence,
        incarnation="1",
        sent_unix_ms=now_ms,
        pool="shared",
        role=vocabulary_pb2.NODE_ROLE_MIXED,
        accepting=True,
        triton_grpc_address=f"127.0.0.1:{options['port']}",
        loader_address="127.0.0.1:1",
        tiers=[
            vocabulary_pb2.TierBytes(
                tier=vocabulary_pb2.TIER_DEVICE, capacity=DEVICE_BYTES, resident=len(instances) << 20
            )
        ],
        instances=instances,
    )


async def serve(options: dict[str, Any]) -> None:
    """Serve and tell until the process ends."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 20_000)])
    server.add_generic_rpc_handlers((FakeTriton(),))
    server.add_insecure_port(f"127.0.0.1:{options['port']}")
    await server.start()
    bus = await NatsBus.connect(options["nats_url"], name="fake-node")
    sequence = 0
    while True:
        sequence += 1
        await bus.publish(subjects.node_state(NODE_ID), node_state(options, sequence).SerializeToString())
        await asyncio.sleep(TELL_S)


if __name__ == "__main__":
    uvloop.run(serve(json.loads(Path(sys.argv[1]).read_text())))
