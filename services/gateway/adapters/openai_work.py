"""From a checked OpenAI body to `Work`: model resolved, prompts rendered and counted, window checked, calls laid out.

Nothing is spent here (invariant 15): no limit is touched and no engine is called. The cache salt comes from the
authenticated tenant alone (invariants 11 and 16).
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from roundhouse.block_keys import prefix_block_keys, tenant_salt
from roundhouse.catalogue.records import Adapter, Engine, Interface, Model, Tenant
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import RequestId
from services.gateway.adapters.openai_bodies import (
    EMBEDDING_INPUTS_MAX,
    PROMPTS_MAX,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    checked_messages,
    prompts_of,
)
from services.gateway.domain.context_window import (
    CHAT_OUTPUT_TOKENS_DEFAULT,
    COMPLETION_OUTPUT_TOKENS_DEFAULT,
    check_input,
    output_limit,
)
from services.gateway.domain.sampling import Sampling, check_vocabulary
from services.gateway.operations.accounting import Work
from services.gateway.operations.resolve_model import RequestContext, resolve_model
from services.gateway.operations.shared_beginning import NOTHING_SHARED, SharedBeginnings, SharedTokens
from services.gateway.ports import Caller, EngineRequest, TextCodec, TextCodecs

BLOCK_TOKENS = 16  # of our engines; keys of another size would only miss
RESUMING = (Engine.REFERENCE,)  # engines that name their tokens and draw alike on every node, given a seed
CALLS_MAX = 128  # a guess: prompts times choices of one request


def _seed() -> int:
    """A seed nobody asked for, small enough for every choice to add its number."""
    return secrets.randbits(62)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text and as the model's tokens."""

    text: str
    token_ids: tuple[int, ...]
    shared: SharedTokens = NOTHING_SHARED


@dataclass(frozen=True, slots=True)
class Prepared:
    """Work with what the answer's shape needs to know."""

    work: Work
    prompts: tuple[Prompt, ...]
    instead: "Callable[[str], Awaitable[Prepared]] | None" = None  # the same request for the model's fallback


@dataclass(frozen=True, slots=True)
class _Resolved:
    tenant: Tenant
    model: Model
    adapter: Adapter | None
    codec: TextCodec


class OpenAIWork:
    """Makes `Work` of bodies."""

    def __init__(
        self, catalogue: CatalogueView, codecs: TextCodecs, cluster: str, chance: Callable[[], int] = _seed
    ) -> None:
        self._catalogue = catalogue
        self._codecs = codecs
        self._cluster = cluster
        self._chance = chance
        self._beginnings = SharedBeginnings(catalogue, cluster)

    async def chat(self, body: ChatBody, context: RequestContext) -> Prepared:
        """Raises InvalidInput, NotFound, Unavailable."""
        sampling = body.checked_sampling()
        messages = checked_messages(body.messages)
        tools = body.checked_tools()
        resolved = await self._resolve(body.model, context.caller)
        if tools and not resolved.codec.renders_tools:
            raise InvalidInput(
                "This model's chat template has no place for tools.", code="unsupported_parameter", param="tools"
            )
        text = await resolved.codec.render_chat(messages, tools)
        # The template writes the model's special tokens itself.
        [token_ids] = await resolved.codec.encode([text], add_special_tokens=False)
        [prompt] = await self._sharing(context, resolved, [_as_begun(resolved, Prompt(text, token_ids))], chat=True)
        prepared = self._generation(
            "chat", context, resolved, [prompt], sampling, CHAT_OUTPUT_TOKENS_DEFAULT, param="messages"
        )

        async def instead(model: str) -> Prepared:
            return await self.chat(msgspec.structs.replace(body, model=model), _for_fallback(context))

        return replace(prepared, instead=instead)

    async def completion(self, body: CompletionBody, context: RequestContext) -> Prepared:
        """Raises InvalidInput, NotFound, Unavailable."""
        sampling = body.checked_sampling()
        given = prompts_of(body.prompt, param="prompt", at_most=PROMPTS_MAX)
        if len(given) * sampling.n > CALLS_MAX:
            raise InvalidInput(f"prompts times 'n' may be at most {CALLS_MAX}.", param="n")
        resolved = await self._resolve(body.model, context.caller)
        prompts = [_as_begun(resolved, each) for each in await _prompts(given, resolved.codec, "prompt")]
        prompts = await self._sharing(context, resolved, prompts, chat=False)
        prepared = self._generation(
            "completion", context, resolved, prompts, sampling, COMPLETION_OUTPUT_TOKENS_DEFAULT, param="prompt"
        )

        async def instead(model: str) -> Prepared:
            return await self.completion(msgspec.structs.replace(body, model=model), _for_fallback(context))

        return replace(prepared, instead=instead)

    async def embedding(self, body: EmbeddingBody, context: RequestContext) -> Prepared:
        """Raises InvalidInput, NotFound, Unavailable."""
        body.check()
        given = prompts_of(body.input, param="input", at_most=EMBEDDING_INPUTS_MAX)
        resolved = await self._resolve(body.model, context.caller)
        prompts = await _prompts(given, resolved.codec, "input")
        for prompt in prompts:
            check_input(resolved.model, prompt_tokens=len(prompt.token_ids), param="input")
        calls = [self._call(context, resolved, prompt, "", phase="embed") for prompt in prompts]
        return self._prepared("embedding", context, resolved, prompts, calls, output_tokens=0, choices=1)

    def _generation(
        self,
        operation: str,
        context: RequestContext,
        resolved: _Resolved,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        default: int,
        *,
        param: str,
    ) -> Prepared:
        check_vocabulary(sampling, resolved.codec.vocabulary_size)
        if sampling.prompt_logprobs is not None and resolved.model.engine is not Engine.REFERENCE:
            raise InvalidInput("'echo' with 'logprobs' is not supported by this model.", param="echo")
        if sampling.logit_bias and resolved.model.engine is Engine.VLLM:
            # Its backend hands JSON's keys, which are texts, to vLLM as token ids: every such request would fail.
            raise InvalidInput("'logit_bias' is not supported by this model.", param="logit_bias")
        if sampling.seed is None and resolved.model.engine in RESUMING:
            sampling = replace(sampling, seed=self._chance())
        extra = self._told_in_parameters(context.caller, resolved)
        calls: list[EngineRequest] = []
        total = 0
        for prompt in prompts:
            limit = output_limit(
                resolved.model,
                prompt_tokens=len(prompt.token_ids),
                asked=sampling.max_tokens,
                default=default,
                param=param,
            )
            if sampling.min_tokens is not None and sampling.min_tokens > limit:
                raise InvalidInput("'min_tokens' is more than the completion may have.", param="min_tokens")
            total += limit * sampling.n
            for choice in range(sampling.n):
                parameters = sampling.engine_parameters(choice, limit, extra)
                calls.append(self._call(context, resolved, prompt, parameters, logprobs=sampling.logprobs is not None))
        return self._prepared(operation, context, resolved, prompts, calls, output_tokens=total, choices=sampling.n)

    def _call(
        self,
        context: RequestContext,
        resolved: _Resolved,
        prompt: Prompt,
        parameters: str,
        *,
        phase: str = "full",
        logprobs: bool = False,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=context.request_id,
            text_input=_engine_text(resolved, prompt),
            prompt_token_ids=prompt.token_ids,
            sampling_parameters=parameters,
            phase=phase,
            # Always in pieces: what a client who leaves has to pay is what came until then (case B35).
            stream=True,
            salt=self._salt(context.caller),
            shared_salt=prompt.shared.salt.hex(),
            shared_tokens=prompt.shared.tokens,
            adapter_path="",  # on the node: its loader says it (`adapter_places`)
            adapter_digest=resolved.adapter.digest if resolved.adapter else "",
            adapter_name=resolved.adapter.name if resolved.adapter else "",
            tenant_id=context.caller.tenant_id,
            return_logprobs=logprobs,
            return_token_ids=phase == "full" and resolved.model.engine in RESUMING,
        )

    def _prepared(
        self,
        operation: str,
        context: RequestContext,
        resolved: _Resolved,
        prompts: Sequence[Prompt],
        calls: Sequence[EngineRequest],
        *,
        output_tokens: int,
        choices: int,
    ) -> Prepared:
        work = Work(
            request_id=context.request_id,
            operation=operation,
            caller=context.caller,
            tenant=resolved.tenant,
            model=resolved.model,
            adapter=resolved.adapter,
            input_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            max_output_tokens=output_tokens,
            deadline_unix_ms=context.deadline_unix_ms,
            calls=tuple(calls),
            choices=choices,
            block_keys=self._block_keys(context.caller, resolved, prompts[0]) if operation != "embedding" else (),
            shared=prompts[0].shared.blocks(BLOCK_TOKENS),
            fallback_allowed=operation != "embedding" and _may_fall_back(context, resolved),
        )
        return Prepared(work, tuple(prompts))

    async def _resolve(self, name: str, caller: Caller) -> _Resolved:
        tenant, model, adapter = resolve_model(self._catalogue, caller, name)
        if model.interface is not Interface.LLM or not model.tokenizer_path:
            raise InvalidInput(
                f"The model '{model.name}' is called with tensors, under /v2.", code="wrong_interface", param="model"
            )
        return _Resolved(tenant, model, adapter, await self._codecs.codec(model))

    async def _sharing(
        self, context: RequestContext, resolved: _Resolved, prompts: Sequence[Prompt], *, chat: bool
    ) -> list[Prompt]:
        """The prompts, with what of each is in a sharing group's cache space."""
        tenant, codec = context.caller.tenant_id, resolved.codec
        shared = [await self._beginnings.of(tenant, codec, prompt.token_ids, chat=chat) for prompt in prompts]
        return [replace(prompt, shared=each) for prompt, each in zip(prompts, shared, strict=True)]

    def _told_in_parameters(self, caller: Caller, resolved: _Resolved) -> Mapping[str, object] | None:
        """What an engine behind Triton's vLLM backend, which reads no input of ours, is told of the cache space."""
        if resolved.model.engine is not Engine.VLLM:
            return None
        digest = {"adapter_digest": resolved.adapter.digest} if resolved.adapter else {}
        return {"salt": self._salt(caller), **digest}

    def _salt(self, caller: Caller) -> str:
        return tenant_salt(self._cluster, caller.tenant_id).hex()

    def _block_keys(self, caller: Caller, resolved: _Resolved, prompt: Prompt) -> tuple[bytes, ...]:
        adapter = _digest_bytes(resolved.adapter.digest) if resolved.adapter else b""
        salt = tenant_salt(self._cluster, caller.tenant_id)
        model = _digest_bytes(resolved.model.digest)
        shared = prompt.shared.blocks(BLOCK_TOKENS)
        return tuple(prefix_block_keys(salt, model, adapter, BLOCK_TOKENS, prompt.token_ids, shared))


def _for_fallback(context: RequestContext) -> RequestContext:
    """Another id, since the admission under the first one was withdrawn and stays so; fallbacks do not chain."""
    return replace(context, fallback=False, request_id=RequestId(f"{context.request_id}.f"))


def _may_fall_back(context: RequestContext, resolved: _Resolved) -> bool:
    """An adapter has no fallback: what it was tuned for is in no other model."""
    if resolved.model.fallback is None or resolved.adapter is not None:
        return False
    return resolved.tenant.fallback if context.fallback is None else context.fallback


def _as_begun(resolved: _Resolved, prompt: Prompt) -> Prompt:
    """With the tokens that vLLM's backend makes of it, also where a template, or a caller's list, begins without them:
    else queues and limits count one less than the engine, and the blocks of its prompts have other names."""
    if resolved.model.engine is not Engine.VLLM:
        return prompt
    return replace(prompt, token_ids=resolved.codec.with_leading(prompt.token_ids))


def _engine_text(resolved: _Resolved, prompt: Prompt) -> str:
    """vLLM's backend takes text alone and begins it with the model's special tokens, which chat templates write too."""
    if resolved.model.engine is not Engine.VLLM:
        return prompt.text
    return resolved.codec.without_leading(prompt.text, prompt.token_ids)


def _digest_bytes(digest: str) -> bytes:
    """The bytes of a "sha256:…" digest, as engines put them into block keys."""
    return bytes.fromhex(digest.removeprefix("sha256:"))


async def _prompts(given: list[str | list[int]], codec: TextCodec, param: str) -> list[Prompt]:
    """Texts with their token ids; `given` has one kind only. Raises InvalidInput for an id that the model lacks."""
    texts = [one for one in given if isinstance(one, str)]
    if texts:
        encoded = await codec.encode(texts, add_special_tokens=True)
        return [Prompt(text, ids) for text, ids in zip(texts, encoded, strict=True)]
    lists = [one for one in given if isinstance(one, list)]
    if any(not 0 <= token < codec.vocabulary_size for one in lists for token in one):
        raise InvalidInput("a token id is not in the model's vocabulary.", param=param)
    return [Prompt(codec.decode(one), tuple(one)) for one in lists]
