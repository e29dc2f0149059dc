"""`InferenceNode` in memory: answers `tok0 tok1 …` at a set pace, fails where told, and counts what was cancelled."""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from roundhouse.errors import EngineFailed, RoundhouseError
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.ports import HANDOFF, EngineChunk, EngineRequest, TensorReply, TensorRequest


@dataclass
class FakeNode:
    """Passes tests/contract/test_inference_node.py as the real adapter does."""

    interval_ms: int = 0
    fail_after: int | None = None  # tokens; 0 = before the first
    failures_left: int = 1_000_000
    fail_each: int | None = None  # tokens of each call, however many calls
    names_tokens: bool = True
    placements: list[str] = field(default_factory=list)  # node ids, in order of the calls
    failure: RoundhouseError = field(
        default_factory=lambda: EngineFailed("The engine failed while it ran the request.")
    )
    hang_after: int | None = None
    embedding: tuple[float, ...] = (0.5, -0.25, 1.0)
    calls: list[EngineRequest | TensorRequest] = field(default_factory=list)
    timeouts_ms: list[int] = field(default_factory=list)
    open_streams: int = 0
    sent: int = 0  # tokens, of all streams
    cancelled: int = 0

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `InferenceNode.generate`."""
        self.calls.append(request)
        self.placements.append(placement.node_id)
        self.timeouts_ms.append(timeout_ms)
        self.open_streams += 1
        ended = False
        try:
            if request.phase == "embed":
                yield EngineChunk("", 0, len(request.prompt_token_ids), 0, "stop", embedding=self.embedding)
            else:
                async for chunk in self._tokens(request):
                    yield chunk
            ended = True
        except RoundhouseError:
            ended = True
            raise
        finally:
            self.open_streams -= 1
            self.cancelled += not ended

    async def _tokens(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        parameters = json.loads(request.sampling_parameters)
        wanted = int(parameters["max_tokens"])
        assert request.resumed_token_ids == tuple(range(len(request.resumed_token_ids)))
        prefill_only = request.phase == "prefill" and wanted > 1
        for number in range(len(request.resumed_token_ids), 1 if prefill_only else wanted):
            self._maybe_fail(number)
            if self.fail_each is not None and number - len(request.resumed_token_ids) == self.fail_each:
                raise self.failure
            if number == self.hang_after:
                await asyncio.Event().wait()
            await asyncio.sleep(self.interval_ms / 1000)
            self.sent += 1
            yield EngineChunk(
                text=f"tok{number} ",
                output_tokens=1,
                input_tokens=len(request.prompt_token_ids),
                cached_tokens=4 if number == 0 else None,
                finish_reason="length" if number == wanted - 1 else HANDOFF if prefill_only else None,
                logprobs=_logprobs(number) if request.return_logprobs else None,
                token_ids=struct.pack("<i", number) if request.return_token_ids and self.names_tokens else b"",
            )

    def _maybe_fail(self, number: int) -> None:
        if number == self.fail_after and self.failures_left > 0:
            self.failures_left -= 1
            raise self.failure

    async def infer(self, placement: Placement, request: TensorRequest, *, timeout_ms: int) -> TensorReply:
        """Gives the inputs back as outputs."""
        self.calls.append(request)
        self._maybe_fail(0)
        if self.hang_after == 0:
            await asyncio.Event().wait()
        await asyncio.sleep(self.interval_ms / 1000)
        return TensorReply(request.inputs)


def _logprobs(number: int) -> str:
    entry = {"id": number, "token": f"tok{number} ", "bytes": list(f"tok{number} ".encode()), "logprob": -0.5}
    return json.dumps([{**entry, "top": [entry]}])
