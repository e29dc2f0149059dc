"""Triton's model control over gRPC.

Triton's repository index lists only names that have a folder in its model repository, also when the model came with its
files in the load call. So each model has an empty folder there while it is loaded: it is what makes the index tell that
an unload has ended (docs/decisions/0040-triton-control.md). The library's errors become ours here.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonclient.grpc import aio as triton
from tritonclient.utils import InferenceServerException

from engines.packaging import DEVICES_PARAMETER, placement_of
from roundhouse.errors import DeadlinePassed, EngineFailed, RoundhouseError, Unavailable
from services.loader.ports import LoadPackage, PlacedModel, TritonState

# gRPC's own pause between connection attempts grows to 2 minutes: a restarted Triton must be found within a second.
RECONNECT_MS_MAX = 250
MESSAGE_BYTES_MAX = 2**31 - 1  # the files of a native model travel in one message; this is protobuf's limit
CAUSE_CHARACTERS_MAX = 500
_CHANNEL: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
]
# What Triton puts around the engine's own words when a load failed.
_WRAPPING = re.compile(r"^(\[[^]]*\] )?(load failed for model '[^']*': )?(version \d+ is at \w+ state: )?")


class TritonControl:
    """`ModelControl` of one server. Close it when done."""

    def __init__(self, address: str, repository: Path) -> None:
        self._address = address
        self._repository = repository
        self._client = triton.InferenceServerClient(address, channel_args=_CHANNEL)

    async def probe(self, *, timeout_ms: int) -> None:
        """See `ModelControl.probe`."""
        try:
            if not await self._client.is_server_live(client_timeout=timeout_ms / 1000):
                raise Unavailable("Triton says it is not live")
        except InferenceServerException as error:
            raise self._error(error, timeout_ms) from error

    async def index(self, *, timeout_ms: int) -> Mapping[str, TritonState]:
        """See `ModelControl.index`."""
        try:
            answer = await self._client.get_model_repository_index(client_timeout=timeout_ms / 1000)
        except InferenceServerException as error:
            raise self._error(error, timeout_ms) from error
        states: dict[str, TritonState] = {}
        for entry in answer.models:
            states[entry.name] = _busiest(states.get(entry.name, TritonState.UNAVAILABLE), _state(entry.state))
        return states

    async def load(self, name: str, package: LoadPackage, *, timeout_ms: int) -> None:
        """See `ModelControl.load`."""
        self._mark(name)
        try:
            await self._client.load_model(
                name, config=package.config, files=dict(package.files) or None, client_timeout=timeout_ms / 1000
            )
        except InferenceServerException as error:
            raise self._error(error, timeout_ms) from error

    async def unload(self, name: str, *, timeout_ms: int) -> None:
        """See `ModelControl.unload`."""
        self._mark(name)
        try:
            await self._client.unload_model(name, client_timeout=timeout_ms / 1000)
        except InferenceServerException as error:
            raise self._error(error, timeout_ms) from error

    async def placed_on(self, name: str, *, timeout_ms: int) -> PlacedModel:
        """See `ModelControl.placed_on`."""
        try:
            answer = await self._client.get_model_config(name, client_timeout=timeout_ms / 1000)
        except InferenceServerException as error:
            raise self._error(error, timeout_ms) from error
        found = placement_of(answer.config.parameters[DEVICES_PARAMETER].string_value)
        return PlacedModel(found.uuids, found.alone_for)

    async def forget(self, name: str) -> None:
        """See `ModelControl.forget`."""
        try:
            (self._repository / name).rmdir()
        except OSError:
            return  # it was not there, or somebody keeps something in it

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    def _mark(self, name: str) -> None:
        try:
            (self._repository / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(f"Triton's model repository cannot be written: {error.strerror}") from error

    def _error(self, error: Any, timeout_ms: int) -> RoundhouseError:
        status = str(error.status())
        if status.endswith("DEADLINE_EXCEEDED"):
            return DeadlinePassed(f"Triton did not answer within {timeout_ms} ms")
        if status.endswith(("UNAVAILABLE", "CANCELLED")):
            return Unavailable(f"Triton is away at {self._address}")
        return EngineFailed(cause_of(str(error.message())), code="load_failed")


def cause_of(text: str) -> str:
    """What the engine said, out of what Triton made of it: one line, bounded."""
    line = " ".join(_WRAPPING.sub("", text).split()).rstrip("; ")
    return line[:CAUSE_CHARACTERS_MAX] or "Triton gave no reason"


def _state(text: str) -> TritonState:
    return TritonState(text) if text in _NAMES else TritonState.UNAVAILABLE


_NAMES = frozenset(state.value for state in TritonState)
_ORDER = (TritonState.UNAVAILABLE, TritonState.READY, TritonState.UNLOADING, TritonState.LOADING)


def _busiest(one: TritonState, other: TritonState) -> TritonState:
    """The state of a model with several versions: it moves while any does, and is here while any is."""
    return max(one, other, key=_ORDER.index)
