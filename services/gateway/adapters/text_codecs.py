"""Tokenizers and chat templates of models, loaded off the event loop when first needed and kept by digest.

Counting with the model's own tokenizer is what makes limits, fairness and bills agree with the engine. Templates come
with models, so they are programs of strangers: they run in Jinja's immutable sandbox and only get the conversation.
Source of the files: the Hugging Face checkpoint layout (tokenizer.json, tokenizer_config.json, chat_template.jinja).
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from roundhouse.catalogue.records import Model
from roundhouse.errors import InvalidInput, Unavailable
from services.gateway.adapters.template_sandbox import ChatEnvironment, TemplateRefusal, TemplateTooLong

CODECS_MAX = 64  # a guess: some 10 MB each for a vocabulary of 128,000
INLINE_S_MAX = 0.01  # a guess: a template that takes longer leaves the loop
INLINE_CHARACTERS_MAX = 4_000  # about 1 ms of encoding; longer texts leave the loop


class HuggingFaceCodec:
    """`TextCodec` of one checkpoint folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Reads the files; raises OSError or ValueError. Takes from 1 ms to 1 s: call it off the loop."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
        self._leading = _leading(self._tokenizer)
        source = _template_source(folder, config)
        self._environment = ChatEnvironment()
        self._renders_quickly = False
        self._template = self._environment.from_string(source) if source is not None else None
        if self._template is not None:  # a plain dict instead of a chain of maps, which is copied for every rendering
            self._template.globals = dict(self._template.globals)
        self.renders_tools: bool = source is not None and "tools" in source

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """See `TextCodec.encode`."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS_MAX:
            return self._encode(texts, add_special_tokens)
        return await asyncio.to_thread(self._encode, texts, add_special_tokens)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        # One by one, not `encode_batch`: its pool of threads would take the cores of everyone else on the machine.
        encode = self._tokenizer.encode
        return [tuple(encode(text, add_special_tokens=add_special_tokens).ids) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `TextCodec.decode`."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def without_leading(self, text: str, token_ids: Sequence[int]) -> str:
        """See `TextCodec.without_leading`."""
        lead, ids = self._leading
        if not ids or not text.startswith(lead):
            return text
        # A caller may have written them too: then the engine's come before his, as they did here.
        twice = tuple(token_ids[: 2 * len(ids)]) == ids * 2 and not text.startswith(lead * 2)
        return text if twice else text.removeprefix(lead)

    def with_leading(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """See `TextCodec.with_leading`."""
        _, ids = self._leading
        begins = tuple(token_ids[: len(ids)]) == ids
        return tuple(token_ids) if begins else (*ids, *token_ids)

    async def render_chat(self, messages: Sequence[object], tools: Sequence[object] | None) -> str:
        """See `TextCodec.render_chat`."""
        size = sum(len(str(message)) for message in messages)
        if self._renders_quickly and size <= INLINE_CHARACTERS_MAX:
            return self._timed(messages, tools, size)
        return await asyncio.to_thread(self._timed, messages, tools, size)

    def _timed(self, messages: Sequence[object], tools: Sequence[object] | None, size: int) -> str:
        """Render, and remember whether the template is quick: until it has shown that, it does not run on the loop."""
        began_s = time.perf_counter()
        try:
            return self._render(messages, tools)
        finally:
            if size <= INLINE_CHARACTERS_MAX:
                self._renders_quickly = time.perf_counter() - began_s < INLINE_S_MAX

    def _render(self, messages: Sequence[object], tools: Sequence[object] | None) -> str:
        if self._template is None:
            raise InvalidInput("This model has no chat template; use /v1/completions.", param="messages")
        values = {"messages": messages, "tools": tools, "add_generation_prompt": True, **self._special}
        try:
            return self._environment.bounded(self._template, values)
        except TemplateRefusal as error:
            raise InvalidInput(str(error), param="messages") from error
        except TemplateTooLong as error:
            raise InvalidInput("The prompt is too long.", code="context_length_exceeded", param="messages") from error
        except Exception as error:  # a stranger's program may raise anything
            raise InvalidInput("The model's chat template does not take these messages.", param="messages") from error


class CheckpointCodecs:
    """`TextCodecs`: least recently used of `CODECS_MAX`, one load at a time for each version."""

    def __init__(self) -> None:
        self._codecs: OrderedDict[tuple[str, str], asyncio.Task[HuggingFaceCodec]] = OrderedDict()

    async def codec(self, model: Model) -> HuggingFaceCodec:
        """See `TextCodecs.codec`. A failed load is tried again by the next caller; cancellation does not stop it."""
        key = (model.tokenizer_path, model.digest)
        task = self._codecs.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(HuggingFaceCodec, Path(model.tokenizer_path)))
            self._codecs[key] = task
            while len(self._codecs) > CODECS_MAX:
                self._codecs.popitem(last=False)
        else:
            self._codecs.move_to_end(key)
        if task.done() and task.exception() is None:
            return task.result()
        try:
            return await asyncio.shield(task)
        except Exception as error:  # the tokenizers library raises bare Exception
            self._codecs.pop(key, None)
            raise Unavailable(f"The tokenizer of '{model.name}' cannot be read.") from error


def _leading(tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    """The special tokens that are put before every text, as text and ids; none for many models."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return "".join(tokenizer.id_to_token(each) or "" for each in whole[:at]), tuple(whole[:at])


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or named.get("tool_use")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value or "")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
