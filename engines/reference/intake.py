"""Turns the inputs of one call into a checked `GenerationRequest`; what is wrong is found here, before the queue."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.reference.kv_cache import BlockSpace, CachedPrefix, NoBlockStore
from engines.reference.loaded_model import LoadedModel, named_bytes
from engines.reference.paged_kv import BLOCK_TOKENS
from engines.reference.sampling_params import InvalidRequest, parse_sampling_params
from engines.reference.sequence import BlockKeys, GenerationRequest, check_fits

PHASES = ("full", "embed", "prefill", "decode")
REQUEST_ID_CHARACTERS_MAX = 256
PEERS_MAX = 8
PATIENCE_MS_MAX = 2_000  # a guess: 4 GB from a peer at 2 GB/s; nobody should wait longer without a sign of life
PATIENCE_MS_MIN = 20  # also before anything has been measured; a guess at what nobody notices
PATIENCE_SHARE = 0.5  # of the time to compute what is awaited
HANDED_TOKEN_MS = 0.5  # a token of a handed-over prompt, before a prefill was measured here: 2,000 a second, a guess


@dataclass(frozen=True, slots=True)
class CallInputs:
    """The input tensors of one call as plain values."""

    text_input: str
    sampling_parameters: str = ""
    roundhouse: str = ""
    stream: bool = False
    exclude_input_in_output: bool = True
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class CallDetails:
    """The `roundhouse` input: what our gateway says about a request beyond the contract of Triton's vLLM backend."""

    request_id: str
    phase: str = "full"
    salt: str = ""
    shared_salt: str = ""
    shared_tokens: int = 0
    kv_peers: tuple[str, ...] = ()
    kv_hold: str = ""
    adapter_path: str = ""
    adapter_digest: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    resumed_token_ids: tuple[int, ...] = ()
    return_token_ids: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call: the request for the engine, and what the reply needs to know."""

    inputs: CallInputs
    details: CallDetails
    request: GenerationRequest

    @property
    def awaits_more(self) -> bool:
        """Whether slower tiers have more of its prompt, so that `await_prefix` may be worth its time."""
        return self.request.prefix.more > 0


def accept_call(model: LoadedModel, inputs: CallInputs) -> Call:
    """Check everything a call asks for; raises `InvalidRequest` or `ContextLengthExceeded`. Thread-safe.

    Looks up the block store last, so a refused request costs nothing, and only in memory, so it never waits long. The
    prefix found is released by the engine.
    """
    details = parse_details(inputs.roundhouse)
    params = parse_sampling_params(inputs.sampling_parameters, model.config.vocab_size)
    if inputs.return_logprobs and params.logprobs is None:
        params = replace(params, logprobs=0)
    adapter = model.adapters.get(details.adapter_path, details.adapter_digest) if details.adapter_path else None
    request = GenerationRequest(
        # Ours, not the caller's: two attempts of one request may be here at once.
        request_id=uuid.uuid4().hex,
        prompt=_prompt(model, inputs, details),
        params=params,
        embed=details.phase == "embed",
        prefill_only=details.phase == "prefill",
        resumed=details.resumed_token_ids,
        adapter=adapter,
        space=_space(details),
        block_keys=_block_keys(model, details),
    )
    _check_resumed(model, request)
    check_fits(request, model.limits, model.blocks_total)
    return Call(inputs, details, replace(request, prefix=_look_up(model, request)))


def await_prefix(model: LoadedModel, call: Call) -> Call:
    """The call with what slower tiers give it in time; waits at most `PATIENCE_MS_MAX`. Thread-safe. Never raises.

    Patience is half of what computing those blocks would take, as measured: a late block is worth less than none. An
    instance that only decodes may never have measured it."""
    request = call.request
    tokens = request.prefix.more * BLOCK_TOKENS
    measured = model.engine.prefill_ms_a_token or (HANDED_TOKEN_MS if request.space.hold else 0.0)
    patience_ms = int(min(PATIENCE_MS_MAX, max(PATIENCE_MS_MIN, PATIENCE_SHARE * tokens * measured)))
    deeper = _look_up(model, request, patience_ms)
    if len(deeper.blocks) <= len(request.prefix.blocks):
        deeper.release()
        return call
    request.prefix.release()
    return Call(call.inputs, call.details, replace(request, prefix=deeper))


def parse_details(text: str) -> CallDetails:
    """Parse the `roundhouse` input; raises `InvalidRequest`. Unknown fields are ignored: a gateway may be newer."""
    try:
        raw = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("roundhouse", f"not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("roundhouse", "a JSON object is expected")
    phase = raw.get("phase") or "full"
    if phase not in PHASES:
        raise InvalidRequest("phase", f"must be one of {', '.join(PHASES)}")
    adapter = raw.get("adapter") or {}
    if not isinstance(adapter, dict) or (adapter and not adapter.get("path")):
        raise InvalidRequest("adapter", "an object with path and digest is expected")
    shared = raw.get("shared") or {}
    if not isinstance(shared, dict):
        raise InvalidRequest("shared", "an object with salt and tokens is expected")
    return CallDetails(
        request_id=_text(raw, "request_id")[:REQUEST_ID_CHARACTERS_MAX],
        phase=phase,
        salt=_text(raw, "salt"),
        shared_salt=_text(shared, "salt"),
        shared_tokens=_count(shared, "tokens"),
        kv_peers=_texts(raw.get("kv_peers")),
        kv_hold=_text(raw, "kv_hold"),
        adapter_path=_text(adapter, "path"),
        adapter_digest=_text(adapter, "digest"),
        prompt_token_ids=_token_ids(raw, "prompt_token_ids"),
        resumed_token_ids=_token_ids(raw, "resumed_token_ids") or (),
        return_token_ids=raw.get("return_token_ids") is True,
        traceparent=_text(raw, "traceparent"),
    )


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(name, "a string is expected")
    return value or ""


def _texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InvalidRequest("kv_peers", "a list of addresses is expected")
    return tuple(value[:PEERS_MAX])


def _count(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(name, "a count is expected")
    return value


def _space(details: CallDetails) -> BlockSpace:
    """Where the blocks of a call live. Of a shared beginning only whole blocks are shared."""
    shared_blocks = details.shared_tokens // BLOCK_TOKENS if details.shared_salt else 0
    return BlockSpace(
        named_bytes(details.salt),
        named_bytes(details.shared_salt) if shared_blocks else b"",
        shared_blocks,
        details.kv_peers,
        details.kv_hold,
    )


def _token_ids(raw: dict[str, Any], name: str) -> tuple[int, ...] | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise InvalidRequest(name, "a list of token ids is expected")
    return tuple(value)


def _prompt(model: LoadedModel, inputs: CallInputs, details: CallDetails) -> tuple[int, ...]:
    """Token ids to compute: those given, else the tokenized text; the begin token alone for an empty text."""
    if details.prompt_token_ids is None:
        prompt = tuple(model.tokens.encode(inputs.text_input))
        if not prompt and model.config.bos_token_id is not None:
            prompt = (model.config.bos_token_id,)
        name = "text_input"
    else:
        prompt, name = details.prompt_token_ids, "prompt_token_ids"
    if not prompt:
        raise InvalidRequest(name, "the prompt is empty")
    if min(prompt) < 0 or max(prompt) >= model.config.vocab_size:
        raise InvalidRequest(name, f"a token id is not in the vocabulary of {model.config.vocab_size} tokens")
    return prompt


def _check_resumed(model: LoadedModel, request: GenerationRequest) -> None:
    resumed, name = request.resumed, "resumed_token_ids"
    if not resumed:
        return
    if request.embed or request.prefill_only:
        raise InvalidRequest(name, "only a generation can be resumed")
    if len(resumed) >= request.params.max_tokens:
        raise InvalidRequest(name, "nothing is left of max_tokens")
    if min(resumed) < 0 or max(resumed) >= model.config.vocab_size:
        raise InvalidRequest(name, f"a token id is not in the vocabulary of {model.config.vocab_size} tokens")


def _block_keys(model: LoadedModel, details: CallDetails) -> BlockKeys:
    """How this request's blocks are keyed. The salt keeps tenants apart: without one nothing is shared."""
    if isinstance(model.store, NoBlockStore) or not details.salt:
        return lambda token_ids: []
    from roundhouse.block_keys import SharedBeginning, prefix_block_keys

    space, adapter = _space(details), named_bytes(details.adapter_digest)
    shared = SharedBeginning(space.shared_salt, space.shared_blocks)

    def keys(token_ids: Sequence[int]) -> list[bytes]:
        return prefix_block_keys(space.salt, model.model_digest, adapter, BLOCK_TOKENS, token_ids, shared)

    return keys


def _look_up(model: LoadedModel, request: GenerationRequest, patience_ms: int = 0) -> CachedPrefix:
    """The longest stored prefix that leaves a token to compute; none for what needs the state of every token.

    A handed-over prompt is on its way: without patience it is not asked for, only said to be there. A store that is
    slow for a moment must not make this instance compute beside its streams what another one has computed."""
    if request.embed or request.scores_prompt:
        return CachedPrefix()
    keys = request.block_keys(request.known)[: (len(request.known) - 1) // BLOCK_TOKENS]
    if request.space.hold and not patience_ms:
        return CachedPrefix(more=len(keys))
    prefix = model.store.lookup(request.space, keys, patience_ms) if keys else CachedPrefix()
    if any(block.shape != model.block_shape.dimensions for block in prefix.blocks):
        prefix.release()
        return CachedPrefix()
    return prefix
