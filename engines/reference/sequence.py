"""One request inside the engine: what it asked for, how far it is, and what it tells its caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engines.reference.kv_cache import BlockSpace, CachedPrefix
from engines.reference.lora import LoraAdapter
from engines.reference.paged_kv import BLOCK_TOKENS, BlockTable, blocks_for
from engines.reference.sampler import Sampler, TokenLogprobs
from engines.reference.sampling_params import SamplingParams
from engines.reference.text_stream import StopMatcher, TextStream

FinishReason = Literal["stop", "length", "handoff"]
"""`handoff`: the prompt and the first token are done, and another instance goes on from there."""
BlockKeys = Callable[[Sequence[int]], list[bytes]]
NO_SPACE = BlockSpace(b"")


def _no_keys(token_ids: Sequence[int]) -> list[bytes]:
    """Without a block store nothing is keyed."""
    return []


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request.

    `resumed` are tokens that it has generated elsewhere: it goes on after them as if it had generated them here.
    `prefill_only` ends it after its first token, for another instance to go on. `block_keys` gives the key of each
    whole block of the tokens it is handed; `space`, which they are made for, says where in the block store they belong.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    embed: bool = False
    adapter: LoraAdapter | None = None
    space: BlockSpace = NO_SPACE
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    block_keys: BlockKeys = _no_keys
    resumed: tuple[int, ...] = ()
    prefill_only: bool = False

    @property
    def tokens_max(self) -> int:
        """Prompt plus the longest completion."""
        completion = 1 if self.prefill_only else self.params.max_tokens
        return len(self.prompt) + (0 if self.embed else completion)

    @property
    def scores_prompt(self) -> bool:
        """Whether every token of the prompt is to be scored. One that goes on from elsewhere was scored there."""
        return self.params.prompt_logprobs is not None and not self.resumed and not self.embed

    @property
    def known(self) -> tuple[int, ...]:
        """What there is to compute before the next token can be chosen."""
        return self.prompt + self.resumed


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds a request waited for admission, until its first token from then, and from there until now."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class TokenGenerated:
    """One new token. `text` may be empty (held back, or part of a character); `finish` is set on the last one."""

    request_id: str
    token_id: int
    text: str
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    cached_tokens: int
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token, if asked for: of all prompt tokens but one


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an embedding request: `vector` `[hidden]` of length 1."""

    request_id: str
    vector: NDArray[np.float32]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ended with an error of its own; its neighbours go on."""

    request_id: str
    error: str


Event = TokenGenerated | Embedded | Failed


@dataclass(slots=True, eq=False)
class Running:
    """An admitted request: its blocks, its chance, and the tokens so far."""

    request: GenerationRequest
    table: BlockTable
    sampler: Sampler
    text: TextStream
    token_ids: list[int]
    submitted_s: float
    admitted_s: float
    computed: int = 0
    cached_tokens: int = 0
    imported_blocks: int = 0  # of the prefix, copied and not yet checked
    importing: bool = False
    offered_blocks: int = 0
    prompt_keys: list[bytes] = field(default_factory=list)
    first_token_s: float | None = None
    hidden: list[NDArray[np.float32]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @staticmethod
    def admit(
        request: GenerationRequest,
        table: BlockTable,
        endings: frozenset[int],
        vocab_size: int,
        submitted_s: float,
        now_s: float,
    ) -> Running:
        """Begin a request that has its blocks; `endings` are the model's end tokens."""
        params = request.params
        return Running(
            request=request,
            table=table,
            sampler=Sampler(params, request.prompt, endings, vocab_size),
            text=TextStream(StopMatcher(params.stop, params.include_stop_str_in_output)),
            token_ids=list(request.prompt),
            submitted_s=submitted_s,
            admitted_s=now_s,
        )

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def uncomputed(self) -> int:
        """Tokens known but not yet run through the model: 1 while decoding."""
        return len(self.token_ids) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its tokens come one after the other: it has had its first one here."""
        return self.first_token_s is not None

    def timings(self, now_s: float) -> Timings:
        """Where the time went up to `now_s`."""
        first = self.first_token_s if self.first_token_s is not None else now_s
        return Timings(
            queue_ms=(self.admitted_s - self.submitted_s) * 1e3,
            prefill_ms=(first - self.admitted_s) * 1e3,
            decode_ms=(now_s - first) * 1e3,
        )

    def keys_for(self, tokens: int) -> list[bytes]:
        """Keys of the whole blocks of the first `tokens` tokens; those of the prompt are made once."""
        if not self.prompt_keys:
            self.prompt_keys = self.request.block_keys(self.request.prompt)
        blocks = tokens // BLOCK_TOKENS
        if blocks <= len(self.prompt_keys):
            return self.prompt_keys[:blocks]
        return self.request.block_keys(self.token_ids[:tokens])

    def whole_blocks(self) -> int:
        """Blocks whose every token has been computed."""
        return self.computed // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one instance takes on. `prefill_chunk_tokens` bounds the prompt tokens of a step, so the pause of others."""

    slots: int
    context_tokens: int
    prefill_chunk_tokens: int = 128


class ContextLengthExceeded(Exception):
    """A request that could never run here, however long it waited."""


def check_fits(request: GenerationRequest, limits: EngineLimits, blocks_total: int) -> None:
    """Refuse what can never fit the context or the whole pool; raises `ContextLengthExceeded`. Thread-safe."""
    prompt, total = len(request.prompt), request.tokens_max
    asked = (
        f"{prompt} prompt tokens and max_tokens {total - prompt}" if not request.embed else f"{prompt} prompt tokens"
    )
    if total > limits.context_tokens:
        raise ContextLengthExceeded(
            f"context_length_exceeded: {asked} need {total} tokens,"
            f" the context of this model is {limits.context_tokens}"
        )
    if blocks_for(total) > blocks_total:
        raise ContextLengthExceeded(
            f"context_length_exceeded: {asked} need {blocks_for(total)} blocks of {BLOCK_TOKENS} tokens,"
            f" the KV pool of this instance has {blocks_total}"
        )
