"""Tells a slow engine from a dead one.

A model process that dies leaves its running streams silent: Triton neither ends them nor says anything, and the index
still calls the model ready; only a NEW request is told "Stub process … is not healthy" (tried with Triton 2.51; case
B29). So when a stream has been silent for a while, one small request asks the same model. Any answer but that one
means that the engine lives: a long prefill is never cut short.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from tritonclient.grpc import service_pb2 as kserve

from roundhouse.vocabulary import RequestId
from services.gateway.adapters.node_call import Call, CallFailed
from services.gateway.adapters.triton_tensors import generate_message
from services.gateway.ports import EngineRequest

log = structlog.get_logger(__name__)

SILENCE_S = 2.0  # a guess: many decode steps long; a probe costs the engine one refused request
PROBE_TIMEOUT_S = 5.0
_DEAD = (
    "is not healthy",  # Triton's words for a Python-backend model whose process is gone
    "EngineCore encountered an issue",  # vLLM's, whose engine is a process behind that one (0.8 to 0.32; tried)
)

BeginCall = Callable[[bytes, float], Awaitable[Call]]
"""(message, seconds) → a call on the node of the stream."""


def says_dead(text: str) -> bool:
    """Whether an error text of Triton means that the model's process is gone."""
    return any(words in text for words in _DEAD)


class StreamWatch:
    """One stream that is watched. Set `heard` at each reply; `dead` turns true, and the call is cancelled, if its
    engine died."""

    __slots__ = ("call", "dead", "heard")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.heard = True
        self.dead = False


class InstanceWatches:
    """Watches all streams. One task and one probe for each instance that has any, however many streams."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], set[StreamWatch]] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def add(self, address: str, triton_model_name: str, watch: StreamWatch, begin: BeginCall) -> None:
        """From now on; `remove` it when the stream has ended."""
        instance = (address, triton_model_name)
        streams = self._streams.setdefault(instance, set())
        streams.add(watch)
        if instance not in self._tasks:
            self._tasks[instance] = asyncio.create_task(self._watch(instance, begin), name="silence_watch")

    def remove(self, address: str, triton_model_name: str, watch: StreamWatch) -> None:
        """Not any more. Idempotent. The task ends at its next turn without streams."""
        self._streams.get((address, triton_model_name), set()).discard(watch)

    async def close(self) -> None:
        """Stop watching."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, instance: tuple[str, str], begin: BeginCall) -> None:
        try:
            while True:
                await asyncio.sleep(SILENCE_S)  # the length of a silence, not a wait for an event
                streams = self._streams[instance]
                if not streams:
                    return
                silent = [stream for stream in streams if not stream.heard]
                for stream in streams:
                    stream.heard = False
                if silent and await _is_dead(begin, instance[1]):
                    for stream in silent:
                        stream.dead = not stream.heard
                        if stream.dead:
                            stream.call.cancel()
        finally:
            del self._streams[instance]
            del self._tasks[instance]


async def _is_dead(begin: BeginCall, triton_model_name: str) -> bool:
    """Ask with a request that every engine of the contract refuses at once: it wants no token."""
    try:
        call = await begin(_probe(triton_model_name), PROBE_TIMEOUT_S)
    except (CallFailed, OSError, TimeoutError):
        return False  # the stream's own call is told the same; nothing to add
    try:
        for message in await call.read():
            return says_dead(kserve.ModelStreamInferResponse.FromString(message).error_message)
    except CallFailed:
        return False
    finally:
        call.cancel()
    return False


def _probe(triton_model_name: str) -> bytes:
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
    return bytes(generate_message(triton_model_name, request).SerializeToString())
