"""Turns the inputs of one call into a checked `GenerationRequest`; what is wrong is found here, before the queue."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.reference.kv_cache import CachedPrefix, NoBlockStore
from engines.reference.loaded_model import LoadedModel, named_bytes
from engines.reference.paged_kv import BLOCK_TOKENS
from engines.reference.sampling_params import InvalidRequest, parse_sampling_params
from engines.reference.sequence import BlockKeys, GenerationRequest, check_fits

PHASES = ("full", "embed")
REQUEST_ID_CHARACTERS_MAX = 256


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
    adapter_path: str = ""
    adapter_digest: str = ""
    prompt_token_ids: tuple[int, ...] | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call: the request for the engine, and what the reply needs to know."""

    inputs: CallInputs
    details: CallDetails
    request: GenerationRequest


def accept_call(model: LoadedModel, inputs: CallInputs) -> Call:
    """Check everything a call asks for; raises `InvalidRequest` or `ContextLengthExceeded`. Thread-safe.

    Looks up the block store last, so a refused request costs nothing. The prefix found is released by the engine.
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
        adapter=adapter,
        salt=named_bytes(details.salt),
        block_keys=_block_keys(model, details),
    )
    check_fits(request, model.limits, model.blocks_total)
    return Call(inputs, details, replace(request, prefix=_look_up(model, request)))


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
    return CallDetails(
        request_id=_text(raw, "request_id")[:REQUEST_ID_CHARACTERS_MAX],
        phase=phase,
        salt=_text(raw, "salt"),
        adapter_path=_text(adapter, "path"),
        adapter_digest=_text(adapter, "digest"),
        prompt_token_ids=_token_ids(raw.get("prompt_token_ids")),
        traceparent=_text(raw, "traceparent"),
    )


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(name, "a string is expected")
    return value or ""


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise InvalidRequest("prompt_token_ids", "a list of token ids is expected")
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


def _block_keys(model: LoadedModel, details: CallDetails) -> BlockKeys:
    """How this request's blocks are keyed. The salt keeps tenants apart: without one nothing is shared."""
    if isinstance(model.store, NoBlockStore) or not details.salt:
        return lambda token_ids: []
    from roundhouse.block_keys import prefix_block_keys

    salt, adapter = named_bytes(details.salt), named_bytes(details.adapter_digest)

    def keys(token_ids: Sequence[int]) -> list[bytes]:
        return prefix_block_keys(salt, model.model_digest, adapter, BLOCK_TOKENS, token_ids)

    return keys


def _look_up(model: LoadedModel, request: GenerationRequest) -> CachedPrefix:
    """The longest stored prefix that leaves a token to compute; none for an embedding, which needs every state."""
    if request.embed:
        return CachedPrefix()
    keys = request.block_keys(request.prompt)[: (len(request.prompt) - 1) // BLOCK_TOKENS]
    prefix = model.store.lookup(request.salt, keys) if keys else CachedPrefix()
    if any(block.shape != model.block_shape.dimensions for block in prefix.blocks):
        prefix.release()
        return CachedPrefix()
    return prefix
