"""How far each call of a request has come, over all its attempts: what another instance needs to go on from there.

A call can go on elsewhere if the engine named every token that it gave: the next one gets them, takes chance, history
and text to where they were, and sends what follows (docs/decisions/0114-going-on-elsewhere.md).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.gateway.operations.attempts import Attempt
from services.gateway.ports import EngineChunk, EngineRequest, TensorReply, TensorRequest

ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of the attempts of a request that have ended."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def plus(self, attempt: Attempt) -> "Counts":
        """With those of one more."""
        return Counts(
            self.input_tokens + attempt.input_tokens,
            self.cached_tokens + attempt.cached_tokens,
            self.output_tokens + attempt.output_tokens,
        )


@dataclass(slots=True)
class CallProgress:
    """One call. Mutable; `token_ids` are int32, little-endian."""

    token_ids: bytearray = field(default_factory=bytearray)
    output_tokens: int = 0
    heard: bool = False
    ended: bool = False

    def took(self, piece: EngineChunk | TensorReply) -> None:
        """A piece came."""
        self.heard = True
        if isinstance(piece, TensorReply):
            self.ended = True
            return
        self.token_ids += piece.token_ids
        self.output_tokens += piece.output_tokens
        self.ended = piece.finish_reason is not None

    @property
    def may_go_on(self) -> bool:
        """Whether another instance could continue it without losing or repeating anything."""
        return self.ended or not self.heard or 0 < len(self.token_ids) == ID_BYTES * self.output_tokens

    def resumed(self, call: EngineRequest | TensorRequest) -> EngineRequest | TensorRequest:
        """The call as it is to go on now."""
        if not self.token_ids or isinstance(call, TensorRequest):
            return call
        return replace(call, phase="decode", resumed_token_ids=token_ids_of(self.token_ids))


def token_ids_of(data: bytes | bytearray) -> tuple[int, ...]:
    """Numbers of little-endian int32."""
    return struct.unpack(f"<{len(data) // ID_BYTES}i", data)


def may_go_on(progress: Sequence[CallProgress]) -> bool:
    """Whether all calls of a request can go on, and at least one has something left to do."""
    return all(each.may_go_on for each in progress) and not all(each.ended for each in progress)
