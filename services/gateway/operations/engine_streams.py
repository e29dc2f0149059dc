"""The engine streams of one grant, read as one: a request with several prompts or choices opens several.

Closing the iterator cancels every stream that is open. The first failure ends all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import structlog

from roundhouse.errors import RoundhouseError
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.ports import EngineChunk, EngineRequest, InferenceNode, TensorReply, TensorRequest

log = structlog.get_logger(__name__)

STREAMS_MAX = 8  # a guess: streams of one grant at a time; more would take the slots of others inside the engine
END_S = 0.5  # a guess: the end of a stream comes with its last piece, or right behind it
PIECES_MAX = 64  # pieces read ahead of the client, over all streams of a grant


@dataclass(slots=True)
class Produced:
    """Something came out of call `index`. `seen_before` is False for the first piece of each call."""

    index: int
    piece: EngineChunk | TensorReply
    seen_before: bool


def produced_by(
    node: InferenceNode, placement: Placement, calls: Sequence[EngineRequest | TensorRequest], timeout_ms: int
) -> AsyncGenerator[Produced, None]:
    """Everything the calls produce, in order within each call. Raises what the node raises."""
    if len(calls) == 1:
        return _one(node, placement, calls[0], 0, timeout_ms)
    return _several(node, placement, calls, timeout_ms)


async def _one(
    node: InferenceNode, placement: Placement, call: EngineRequest | TensorRequest, index: int, timeout_ms: int
) -> AsyncGenerator[Produced, None]:
    if isinstance(call, TensorRequest):
        yield Produced(index, await node.infer(placement, call, timeout_ms=timeout_ms), False)
        return
    seen = False
    async with aclosing(node.generate(placement, call, timeout_ms=timeout_ms)) as stream:
        async for chunk in stream:
            yield Produced(index, chunk, seen)
            seen = True


async def _several(
    node: InferenceNode, placement: Placement, calls: Sequence[EngineRequest | TensorRequest], timeout_ms: int
) -> AsyncGenerator[Produced, None]:
    pieces: asyncio.Queue[Produced | BaseException | None] = asyncio.Queue(PIECES_MAX)
    permits = asyncio.Semaphore(STREAMS_MAX)

    async def pump(index: int, call: EngineRequest | TensorRequest) -> None:
        try:
            async with permits:
                async for item in _one(node, placement, call, index, timeout_ms):
                    await pieces.put(item)
            await pieces.put(None)
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            await pieces.put(error)

    pumps = [asyncio.create_task(pump(index, call)) for index, call in enumerate(calls)]
    try:
        running = len(pumps)
        while running:
            item = await pieces.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        await _cancel_all(pumps)


async def _cancel_all(tasks: "list[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def next_or_none(produced: AsyncIterator[Produced]) -> Produced | None:
    """The next piece; None = there is none."""
    return await anext(produced, None)


async def close_streams(first: "asyncio.Future[Produced | None]", produced: AsyncGenerator[Produced, None]) -> None:
    """Stop reading, wherever it is, and close the engine streams."""
    if not first.done():
        first.cancel()
        await asyncio.wait((first,))
    if not first.cancelled():
        first.exception()  # retrieved: whoever closes knows already why
    try:
        await produced.aclose()
    except Exception as error:  # noqa: BLE001 - the request ends as it does, whatever is wrong with a stream
        log.warning("engine_stream_not_closed", error=type(error).__name__)


async def read_to_end(produced: AsyncIterator[Produced]) -> bool:
    """Wait, bounded, for the end behind the last piece; False if something else came, which is nobody's loss now."""
    try:
        async with asyncio.timeout(END_S):
            while await anext(produced, None) is not None:
                pass
    except (RoundhouseError, TimeoutError) as error:
        log.warning("engine_stream_without_end", error=type(error).__name__)
        return False
    return True
