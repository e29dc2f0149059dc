"""Tells a slow engine from a dead one.

A model process that dies leaves its running streams silent: Triton neither ends them nor says anything, and the index
still calls the model ready; only a NEW request is told "Stub process … is not healthy" (tried with Triton 2.51; case
B29). So when a stream has been silent for a while, one small request asks the same model. Any answer but that one
means that the engine lives: a long prefill is never cut short.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from tritonclient.grpc import service_pb2 as kserve

from roundhouse.vocabulary import RequestId
from services.gateway.adapters.triton_tensors import generate_message
from services.gateway.ports import EngineRequest

log = structlog.get_logger(__name__)

SILENCE_S = 2.0  # a guess: many decode steps long; a probe costs the engine one refused request
PROBE_TIMEOUT_S = 5.0
_DEAD = "is not healthy"  # Triton's words for a Python-backend model whose process is gone


def says_dead(text: str) -> bool:
    """Whether an error text of Triton means that the model's process is gone."""
    return _DEAD in text


class SilenceWatch:
    """Watches one stream: `heard()` at each reply; `dead` turns true, and the call is cancelled, if its engine died.

    Use as an async context manager around the reading. One task a stream, no timer a token."""

    def __init__(self, stub: Any, call: Any, triton_model_name: str) -> None:
        self.dead = False
        self._stub = stub
        self._call = call
        self._model = triton_model_name
        self._heard = False
        self._task: asyncio.Task[None] | None = None

    def heard(self) -> None:
        """A reply came."""
        self._heard = True

    async def __aenter__(self) -> "SilenceWatch":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _watch(self) -> None:
        while True:
            self._heard = False
            await asyncio.sleep(SILENCE_S)  # the length of a silence, not a wait for an event
            if not self._heard and await _is_dead(self._stub, self._model):
                self.dead = True
                self._call.cancel()
                return


async def _is_dead(stub: Any, triton_model_name: str) -> bool:
    """Ask with a request that every engine of the contract refuses at once: it wants no token."""
    call = stub.ModelStreamInfer(_once(_probe(triton_model_name)), timeout=PROBE_TIMEOUT_S)
    try:
        async for reply in call:
            return says_dead(reply.error_message)
    except grpc.aio.AioRpcError:
        return False  # the stream's own call will be told the same; nothing to add
    finally:
        call.cancel()
    return False


async def _once(message: kserve.ModelInferRequest) -> AsyncIterator[kserve.ModelInferRequest]:
    yield message


def _probe(triton_model_name: str) -> kserve.ModelInferRequest:
    request = EngineRequest(
        request_id=RequestId("probe"),
        text_input="",
        prompt_token_ids=(),
        sampling_parameters='{"max_tokens":0}',
        phase="full",
        stream=True,
        salt="",
        adapter_path="",
        adapter_digest="",
    )
    return generate_message(triton_model_name, request)
