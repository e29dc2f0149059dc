"""Continuous batching: each step computes a chunk of the waiting prompts and one token for every running request.

Requests are admitted first in, first out, when a slot and blocks for their worst case are free; the first in line is
never overtaken, so it cannot starve, and a running request never waits, so nothing can deadlock. Order between tenants
is not decided here: few slots, and the scheduler's queue in front, see to that. Invariant: a fault of one request is
told to that request alone. Not thread-safe: `engine_loop` owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.reference.decoder import Decoder, Segment
from engines.reference.kv_cache import BlockStore, NoBlockStore
from engines.reference.pacing import Pace, tokens_at_once
from engines.reference.paged_kv import BLOCK_TOKENS, blocks_for
from engines.reference.sampler import Choice, NumericFault, top_logprobs
from engines.reference.sequence import (
    Embedded,
    EngineLimits,
    Event,
    Failed,
    FinishReason,
    GenerationRequest,
    Running,
    TokenGenerated,
)
from engines.reference.text_stream import TextPiece
from engines.reference.token_bytes import TokenText

OFFER_BLOCKS = 8  # generated blocks handed over at once: as many as a chunk of a prompt makes, copied in one step
PREFILL_WEIGHT = 0.2  # of one prompt in the moving average: about the last five


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of the engine between two steps."""

    waiting: int
    running: int
    blocks_free: int
    blocks_total: int


class StepEngine:
    """Everything that is running on one model. `clock` gives seconds that only grow."""

    def __init__(
        self, decoder: Decoder, tokens: TokenText, limits: EngineLimits, store: BlockStore, clock: Callable[[], float]
    ) -> None:
        """The engine takes over the decoder and its pool."""
        self._decoder = decoder
        self._tokens = tokens
        self._limits = limits
        self._store = store
        self._clock = clock
        self._endings = frozenset(decoder.config.eos_token_ids)
        self._waiting: deque[tuple[GenerationRequest, float]] = deque()
        self._running: list[Running] = []
        self._pace = Pace()
        self.prefill_ms_a_token = 0.0  # moving average; 0 = nothing measured yet. Read by the intake

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def statistics(self) -> EngineStatistics:
        """Counts between two steps."""
        pool = self._decoder.pool
        return EngineStatistics(len(self._waiting), len(self._running), pool.blocks_free, pool.blocks_total)

    def submit(self, request: GenerationRequest, now_s: float) -> None:
        """Queue a request that `check_fits` has let through; `now_s` is when it arrived."""
        self._waiting.append((request, now_s))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests, running or waiting, before the next step; unknown ids are ignored. Gives no event."""
        gone = frozenset(request_ids)
        for running in [running for running in self._running if running.request.request_id in gone]:
            self._retire(running)
        for request, _ in self._waiting:
            if request.request_id in gone:
                request.prefix.release()
        self._waiting = deque(entry for entry in self._waiting if entry[0].request_id not in gone)

    def step(self) -> list[Event]:
        """Admit what fits, compute once, and say what came of it. Never raises for the fault of a request."""
        self._admit()
        self._import_some()
        planned = self._plan()
        if not planned:
            return []
        began_s = self._clock()
        with np.errstate(all="ignore"):  # broken weights give NaN, which the sampler reports for its own request
            events = self._compute(planned)
        if all(running.decodes and len(segment.token_ids) == 1 for running, segment in planned):
            self._pace.decoded((self._clock() - began_s) * 1000)
        return events

    def fail_all(self, error: str) -> list[Event]:
        """Give up everything that runs, after a fault that belongs to no single request."""
        failed: list[Event] = [Failed(running.request.request_id, error) for running in self._running]
        for running in list(self._running):
            self._retire(running)
        return failed

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.slots:
            request, submitted_s = self._waiting[0]
            table = self._decoder.pool.take(blocks_for(request.tokens_max))
            if table is None:
                return
            self._waiting.popleft()
            vocab = self._decoder.config.vocab_size
            running = Running.admit(request, table, self._endings, vocab, submitted_s, self._clock())
            self._replay(running)
            running.importing = bool(request.prefix.blocks)
            self._running.append(running)
            if not running.importing:
                request.prefix.release()

    def _replay(self, running: Running) -> None:
        """Bring chance, history and text to where they were elsewhere, after the tokens the request resumes from."""
        for token_id in running.request.resumed:
            running.sampler.replay(token_id)
            running.token_ids.append(token_id)
            self._push_text(running, token_id)  # sent from there

    def _import_some(self) -> None:
        """Copy what the block store had, some of it in each step, so that nobody's next token waits for much of it."""
        budget = self._pace.import_bytes(beside_streams=self._is_beside_streams())
        for running in self._running:
            if running.importing:
                budget -= self._import_prefix(running, budget)
                if budget <= 0:
                    return

    def _import_prefix(self, running: Running, budget: int) -> int:
        """Copy blocks of about `budget` bytes; returns how many bytes. Always leaves a token to compute."""
        prefix, first = running.request.prefix, running.imported_blocks
        usable = min(len(prefix.blocks), (len(running.token_ids) - 1) // BLOCK_TOKENS)
        stop = min(usable, first + max(1, budget // self._decoder.pool.shape.nbytes))
        for index in range(first, stop):
            self._decoder.pool.import_block(running.table, index, prefix.blocks[index])
        running.imported_blocks = stop
        if stop == usable:
            right = prefix.verified(usable)
            prefix.release()
            running.importing = False
            running.offered_blocks = right
            running.computed = running.cached_tokens = right * BLOCK_TOKENS
        return (stop - first) * self._decoder.pool.shape.nbytes

    def _is_beside_streams(self) -> bool:
        return any(running.decodes for running in self._running)

    def _plan(self) -> list[tuple[Running, Segment]]:
        """One token for each decoding request; the prompts share the chunk budget in order of arrival."""
        budget = self._limits.prefill_chunk_tokens
        planned: list[tuple[Running, Segment]] = []
        beside = self._is_beside_streams()
        for running in self._running:
            if running.importing:
                continue
            count = tokens_at_once(running.uncomputed, found=running.cached_tokens > 0, beside_streams=beside)
            if count > 1 or not running.generated:
                count = min(count, budget)
                budget -= count
            if count:
                token_ids = running.token_ids[running.computed : running.computed + count]
                segment = Segment(token_ids, running.computed, running.table, running.request.adapter)
                planned.append((running, segment))
        return planned

    def _compute(self, planned: list[tuple[Running, Segment]]) -> list[Event]:
        hidden = self._decoder.forward([segment for _, segment in planned])
        ready: list[tuple[Running, int]] = []
        events: list[Event] = []
        row = 0
        for running, segment in planned:
            start, row = row, row + len(segment.token_ids)
            running.computed += len(segment.token_ids)
            if running.request.scores_prompt:
                self._score_prompt(running, hidden[start:row], segment.first)
            if running.request.embed:
                events += self._embed(running, hidden[start:row])
            elif not running.uncomputed:
                ready.append((running, row - 1))
            else:
                self._offer(running, running.computed)  # as it is computed: another node may be waiting for it
        if ready:
            logits = self._decoder.logits(hidden[[last for _, last in ready]])
            for (running, _), scores in zip(ready, logits, strict=True):
                events.append(self._next_token(running, scores))
        return events

    def _score_prompt(self, running: Running, hidden: NDArray[np.float32], first: int) -> None:
        """How likely the model found each token of the prompt, but the first, which nothing goes before.

        `hidden` `[rows, hidden]` are the states after the tokens from place `first` on."""
        prompt, count = running.request.prompt, running.request.params.prompt_logprobs or 0
        rows = min(len(hidden), len(prompt) - 1 - first)
        if rows <= 0:
            return
        for place, scores in enumerate(self._decoder.logits(hidden[:rows]), first + 1):
            running.prompt_logprobs.append(top_logprobs(scores, prompt[place], count))

    def _embed(self, running: Running, hidden: NDArray[np.float32]) -> list[Event]:
        """Mean of the final states of all prompt tokens, scaled to length 1."""
        running.hidden.append(hidden)
        if running.uncomputed:
            return []
        mean = np.concatenate(running.hidden).astype(np.float64).mean(axis=0)
        length = float(np.linalg.norm(mean))
        request_id = running.request.request_id
        self._retire(running)
        if not np.isfinite(length):
            return [Failed(request_id, "numeric_fault: the model gave states that are not finite")]
        vector = (mean / (length or 1.0)).astype(np.float32)
        return [Embedded(request_id, vector, running.timings(self._clock()))]

    def _next_token(self, running: Running, scores: NDArray[np.float32]) -> Event:
        try:
            choice = running.sampler.choose(scores)
        except NumericFault as fault:
            self._retire(running)
            return Failed(running.request.request_id, f"numeric_fault: {fault}")
        now_s = self._clock()
        if running.first_token_s is None:
            running.first_token_s = now_s
            self._learn_prefill(running)
            self._offer(running, len(running.request.prompt))
        elif running.whole_blocks() - running.offered_blocks >= OFFER_BLOCKS:
            self._offer(running, running.computed)  # not all at the end, when others would wait for the copies
        running.token_ids.append(choice.token_id)
        text, finish = self._advance_text(running, choice)
        if finish is not None:
            self._offer(running, running.computed)
            self._retire(running)
        return TokenGenerated(
            request_id=running.request.request_id,
            token_id=choice.token_id,
            text=text,
            logprobs=choice.logprobs,
            finish=finish,
            cached_tokens=running.cached_tokens,
            timings=running.timings(now_s),
            prompt_logprobs=tuple(running.prompt_logprobs) if running.generated == 1 else (),
        )

    def _advance_text(self, running: Running, choice: Choice) -> tuple[str, FinishReason | None]:
        """The text that this token lets go, and whether it was the last."""
        params, token_id = running.request.params, choice.token_id
        if self._ends(running, token_id):
            piece = running.text.finish()
            return piece.text, "stop"
        piece = self._push_text(running, token_id)
        if piece.stopped:
            return piece.text, "stop"
        if running.generated < params.max_tokens:
            return piece.text, "handoff" if running.request.prefill_only else None
        rest = running.text.finish()
        return piece.text + rest.text, "stop" if rest.stopped else "length"

    def _push_text(self, running: Running, token_id: int) -> TextPiece:
        params = running.request.params
        hidden = params.skip_special_tokens and self._tokens.is_special(token_id)
        data = b"" if hidden else self._tokens.bytes_of(token_id)
        return running.text.push(data, matching=running.generated >= params.min_tokens)

    def _ends(self, running: Running, token_id: int) -> bool:
        params = running.request.params
        if running.generated < params.min_tokens:
            return False
        return token_id in params.stop_token_ids or (token_id in self._endings and not params.ignore_eos)

    def _offer(self, running: Running, tokens: int) -> None:
        """Hand over the whole blocks of the first `tokens` tokens that the store has not been given yet."""
        if isinstance(self._store, NoBlockStore):
            return
        keys = running.keys_for(tokens)
        first, stop = running.offered_blocks, min(len(keys), running.whole_blocks())
        if first < stop:
            pool, table = self._decoder.pool, running.table
            blocks = [pool.export_block(table, index) for index in range(first, stop)]
            self._store.offer(running.request.space, keys[:stop], blocks)
            running.offered_blocks = stop

    def _learn_prefill(self, running: Running) -> None:
        """How long a prompt token takes, for whoever has to choose between computing and fetching."""
        tokens, took_ms = running.computed - running.cached_tokens, running.timings(self._clock()).prefill_ms
        if tokens >= BLOCK_TOKENS:
            self.prefill_ms_a_token += PREFILL_WEIGHT * (took_ms / tokens - self.prefill_ms_a_token)

    def _retire(self, running: Running) -> None:
        self._running.remove(running)
        if running.importing:
            running.request.prefix.release()
        self._decoder.pool.give_back(running.table)
