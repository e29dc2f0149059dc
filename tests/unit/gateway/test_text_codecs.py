"""Chat templates are programs of strangers: they render in a sandbox, and what they refuse is the caller's to hear."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from roundhouse.errors import InvalidInput, Unavailable
from services.gateway.adapters.text_codecs import CheckpointCodecs, HuggingFaceCodec
from tests.builders.checkpoints import random_checkpoint
from tests.unit.gateway.gateway_world import llm_model


def with_template(path: Path, template: str | None) -> Path:
    """A checkpoint whose chat template is this one."""
    folder = random_checkpoint(path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def render(folder: Path) -> str:
    """One message through the folder's template."""
    return await HuggingFaceCodec(folder).render_chat([{"role": "user", "content": "hi <b>"}], None)


async def test_a_template_sees_messages_and_special_tokens(tmp_path: Path) -> None:
    """Nothing is escaped; `tojson` keeps its characters."""
    folder = with_template(tmp_path, "{{ bos_token }}{{ messages[0].content }}{{ messages[0]|tojson }}")
    assert await render(folder) == '<s>hi <b>{"role": "user", "content": "hi <b>"}'


@pytest.mark.parametrize(
    ("text", "adds", "sent"),
    [
        ("<s>hello", False, "hello"),  # a chat: its template has written it
        ("hello", True, "hello"),  # a completion: it was put before
        ("<s>hello", True, "<s>hello"),  # and its caller wrote one of his own
        ("hello", False, "hello"),  # a template without it: nothing can be left out, so it counts here too
    ],
)
async def test_an_engine_that_begins_texts_itself_makes_the_same_tokens(
    tmp_path: Path, text: str, adds: bool, sent: str
) -> None:
    """Over a tokenizer that begins with `<s>`, as Llama's does: one token too many would shift every position, and be
    counted by the engine and not by us."""
    folder = random_checkpoint(tmp_path / "m")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    tokenizer.save(file)
    codec = HuggingFaceCodec(folder)
    [token_ids] = await codec.encode([text], add_special_tokens=adds)
    assert codec.without_leading(text, token_ids) == sent
    assert codec.with_leading(token_ids) == tuple(tokenizer.encode(sent, add_special_tokens=True).ids)
    plain = HuggingFaceCodec(random_checkpoint(tmp_path / "plain"))
    assert plain.without_leading(text, token_ids) == text
    assert plain.with_leading(token_ids) == token_ids


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.x.y }}",
        "{{ raise_exception('only the system may speak') }}",
    ],
)
async def test_a_template_cannot_break_out(tmp_path: Path, template: str) -> None:
    """Attributes of the interpreter, changes of the input and faults are refused as the caller's input."""
    with pytest.raises(InvalidInput) as refused:
        await render(with_template(tmp_path, template))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '{:1000000000}'.format(5) }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('x', ns.x) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    ],
)
async def test_a_template_ends_and_fills_no_memory(tmp_path: Path, template: str) -> None:
    """Loops without end, recursion, powers, paddings, doublings: refused within seconds as the caller's input."""
    with pytest.raises(InvalidInput):
        await asyncio.wait_for(asyncio.to_thread(asyncio.run, render(with_template(tmp_path, template))), 60)


async def test_joining_and_adding_still_work(tmp_path: Path) -> None:
    """What templates of real models do is as it was: `~`, `+`, `%`, filters and loops with conditions."""
    template = (
        "{% for m in messages if m.role == 'user' %}{{ '<' ~ m.role ~ '>' + m.content|trim }}{{ loop.index }}"
        "{{ '%s' % 'x' }}{{ ['a', 'b']|join('-') }}{% endfor %}{{ 3 * 4 }}{{ 'ab' * 2 }}"
    )
    assert await render(with_template(tmp_path, template)) == "<user>hi <b>1xa-b12abab"


async def test_a_template_may_say_why(tmp_path: Path) -> None:
    """`raise_exception` is how model authors speak to callers."""
    with pytest.raises(InvalidInput, match="only the system"):
        await render(with_template(tmp_path, "{{ raise_exception('only the system may speak') }}"))


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    """Chat needs one; completions do not."""
    with pytest.raises(InvalidInput, match="/v1/completions"):
        await render(with_template(tmp_path, None))


async def test_one_version_is_loaded_once_and_a_broken_one_again(tmp_path: Path) -> None:
    """Callers share a load; a file that was mended is read."""
    folder = random_checkpoint(tmp_path / "m")
    codecs = CheckpointCodecs()
    model = llm_model(tokenizer_path=str(folder))
    assert await codecs.codec(model) is await codecs.codec(model)
    broken = llm_model(tokenizer_path=str(tmp_path / "absent"))
    with pytest.raises(Unavailable):
        await codecs.codec(broken)
    random_checkpoint(tmp_path / "absent")
    assert (await codecs.codec(broken)).vocabulary_size == 261


async def test_long_texts_count_as_short_ones_do(tmp_path: Path) -> None:
    """One token a byte, on the loop or off it; decoding gives the text back."""
    codec = HuggingFaceCodec(random_checkpoint(tmp_path / "m"))
    for size in (10, 10_000):
        [ids] = await codec.encode(["x" * size], add_special_tokens=False)
        assert len(ids) == size
        assert codec.decode(ids) == "x" * size
