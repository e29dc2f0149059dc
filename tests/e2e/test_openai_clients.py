"""The official OpenAI client against the whole mesh: real engines, real queue, real bills."""

import asyncio
import base64
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from roundhouse.event_bus import Message, connect_bus
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from tests.e2e.catalogue import ANSWER
from tests.e2e.mesh import Mesh

pytestmark = pytest.mark.timeout(120)

HELLO: Any = [{"role": "user", "content": "hello"}]
REPLACEMENT = "\ufffd"


@asynccontextmanager
async def client_of(mesh: Mesh, tenant: str = "acme") -> AsyncIterator[AsyncOpenAI]:
    """The official client with a tenant's key; it does not repeat what fails."""
    async with AsyncOpenAI(
        base_url=f"{mesh.http_url}/v1", api_key=mesh.keys[tenant], max_retries=0, timeout=60
    ) as client:
        yield client


class Events:
    """Usage events as they are published, of requests that began at `since_ms` (Unix time) or later."""

    def __init__(self, since_ms: float) -> None:
        self.since_ms = since_ms
        self.seen: list[UsageEvent] = []

    async def of(self, tenant: str, count: int = 1) -> list[UsageEvent]:
        """The first `count` events of a tenant; one too many fails."""
        async with asyncio.timeout(60):
            while len(self._of(tenant)) < count:  # noqa: ASYNC110 - another process publishes
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # a gateway tells several at once, 50 ms apart
        assert len(self._of(tenant)) == count
        return self._of(tenant)

    def _of(self, tenant: str) -> list[UsageEvent]:
        return [
            event
            for event in self.seen
            if event.subject == tenant and event.time_unix_ms - event.data.total_ms >= self.since_ms
        ]


@pytest.fixture
async def events(mesh: Mesh) -> AsyncIterator[Events]:
    """The events of this test; those of the one before may still come."""
    kept = Events(time.time() * 1000)
    bus = await connect_bus(mesh.nats_url, name="test")

    async def keep(message: Message) -> None:
        kept.seen.append(UsageEvent.FromString(message.data))

    await bus.subscribe("rh.v1.usage.>", keep)
    yield kept
    await bus.close()


async def streamed(client: AsyncOpenAI, **options: Any) -> tuple[list[Any], str]:
    """All chunks of a chat stream and the text they make."""
    chunks = [chunk async for chunk in await client.chat.completions.create(messages=HELLO, stream=True, **options)]
    return chunks, "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def whole(client: AsyncOpenAI, **options: Any) -> Any:
    """A chat answer without streaming."""
    return await client.chat.completions.create(messages=HELLO, **options)


async def test_embeddings_of_the_official_client(mesh: Mesh) -> None:
    """Case B01: the client asks for base64 on its own and gets the vector of `float`; another format is refused."""
    unknown: Any = "hex"
    async with client_of(mesh) as client:
        own = (await client.embeddings.create(model="tiny-1", input="a b c")).data[0].embedding
        plain = (
            (await client.embeddings.create(model="tiny-1", input="a b c", encoding_format="float")).data[0].embedding
        )
        raw: Any = (
            await client.embeddings.with_raw_response.create(model="tiny-1", input="a b c", encoding_format="base64")
        ).http_response.json()["data"][0]["embedding"]
        data = base64.b64decode(raw)
        assert len(data) == 4 * len(plain)
        assert list(struct.unpack(f"<{len(plain)}f", data)) == pytest.approx(plain)
        assert own == pytest.approx(plain)
        with pytest.raises(BadRequestError) as refused:
            await client.embeddings.create(model="tiny-1", input="a", encoding_format=unknown)
        assert refused.value.param == "encoding_format"


async def test_nulls_are_absent(mesh: Mesh) -> None:
    """Case B02: at temperature 0 text and usage are the same with and without the nulls."""
    nulls: dict[str, Any] = {"max_tokens": None, "stop": None, "n": None, "logit_bias": None}
    async with client_of(mesh) as client:
        plain = await client.completions.create(model="tiny-1", prompt="hi", temperature=0)
        nulled = await client.completions.create(model="tiny-1", prompt="hi", temperature=0, **nulls)
    assert plain.choices[0].text == nulled.choices[0].text
    assert plain.usage == nulled.usage
    assert plain.usage is not None
    assert plain.usage.completion_tokens <= 16


async def test_usage_in_a_stream(mesh: Mesh, events: Events) -> None:
    """Case B03: chunks with usage are 0, 0, 0, 1; the one has no choices, is last and equals the usage event."""
    wishes: list[dict[str, Any]] = [
        {},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True}},
    ]
    counts = []
    async with client_of(mesh, "globex") as client:
        for wish in wishes:
            chunks, _ = await streamed(client, model="tiny-1", max_tokens=5, temperature=0, **wish)
            counts.append(len([chunk for chunk in chunks if chunk.usage is not None]))
        with pytest.raises(BadRequestError) as refused:
            await whole(client, model="tiny-1", stream_options={"include_usage": True})
    assert counts == [0, 0, 0, 1]
    assert refused.value.param == "stream_options"
    last = chunks[-1]
    assert last.choices == []
    event = (await events.of("globex", 4))[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        event.data.input_tokens,
        event.data.output_tokens,
    )


async def test_a_body_cannot_name_a_tenant(mesh: Mesh, events: Events) -> None:
    """Case B07: the event says acme, whatever body and headers say."""
    lies: dict[str, Any] = {"tenant_id": "globex", "metadata": {"tenant": "globex", "tenant_id": "globex"}}
    async with client_of(mesh) as client:
        await whole(
            client,
            model="tiny-1",
            max_tokens=1,
            user="globex",
            extra_body=lies,
            extra_headers={"X-Tenant-Id": "globex"},
        )
    [event] = await events.of("acme")
    assert event.subject == "acme"
    await events.of("globex", 0)


async def test_what_never_fits_is_refused_at_once(mesh: Mesh) -> None:
    """Case B13: the context of 512 is exceeded: 400, and a short request is answered."""
    async with client_of(mesh) as client:
        with pytest.raises(BadRequestError) as refused:
            await client.completions.create(model="tiny-1", prompt="x" * 600)
        assert refused.value.code == "context_length_exceeded"
        assert (await whole(client, model="tiny-1", max_tokens=2)).usage.completion_tokens <= 2


async def test_a_deadline_passes_in_the_queue(mesh: Mesh, events: Events) -> None:
    """Case B14: four slots are busy for seconds; a request with 1 s ends at about 1 s with 504 and bills nothing."""
    async with client_of(mesh) as busy, client_of(mesh, "globex") as client:
        long = [asyncio.create_task(whole(busy, model="story", max_tokens=200)) for _ in range(8)]
        await asyncio.sleep(2)  # until the slots are taken
        with pytest.raises(APIError) as refused:
            await whole(client, model="story", max_tokens=200, extra_headers={"x-request-deadline-ms": "1000"})
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
    assert refused.value.code == "deadline_exceeded"
    assert all(event.data.output_tokens == 0 for event in events.seen if event.subject == "globex")


async def test_an_engine_that_dies_mid_stream(mesh: Mesh, events: Events) -> None:
    """Case B29: three tokens, then the official client raises; the event says failed with at most 3 tokens."""
    chunks: list[Any] = []
    async with client_of(mesh, "globex") as client:
        stream = await client.chat.completions.create(model="dies", messages=HELLO, stream=True, max_tokens=20)
        with pytest.raises(APIError):
            await read_into(chunks, stream)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(chunks)
    tokens = len([chunk for chunk in chunks if chunk.choices[0].delta.content])
    event = (await events.of("globex"))[-1]
    assert Outcome.from_wire(event.data.outcome) is Outcome.FAILED
    assert event.data.output_tokens == tokens == 3


async def read_into(chunks: list[Any], stream: Any) -> None:
    """Keep what comes until the stream ends or fails."""
    async for chunk in stream:
        chunks.append(chunk)


async def test_characters_split_over_tokens(mesh: Mesh) -> None:
    """Case B31: one byte a token; stream = whole, a stop string is found, a cut character is alike in both modes."""
    async with client_of(mesh) as client:
        _, text = await streamed(client, model="words")
        assert text == (await whole(client, model="words")).choices[0].message.content == ANSWER
        assert REPLACEMENT not in text
        _, stopped = await streamed(client, model="words", stop=["你"])
        assert stopped == (await whole(client, model="words", stop=["你"])).choices[0].message.content == ANSWER[:-1]
        for cut in range(1, len(ANSWER.encode())):
            _, cut_text = await streamed(client, model="words", max_tokens=cut)
            answer = await whole(client, model="words", max_tokens=cut)
            assert cut_text == answer.choices[0].message.content
            assert cut_text.count(REPLACEMENT) <= 1
            assert REPLACEMENT not in cut_text[:-1]


async def test_leaving_a_stream_early_bills_what_was_generated(mesh: Mesh, events: Events) -> None:
    """Case B35 (a): 5 chunks of 200 tokens are read; one event, cancelled, the exact prompt, at least 5 tokens."""
    async with client_of(mesh) as client:
        prompt = (await whole(client, model="story", max_tokens=1)).usage.prompt_tokens
        stream = await client.chat.completions.create(model="story", messages=HELLO, stream=True, max_tokens=200)
        seen = 0
        async for chunk in stream:
            seen += bool(chunk.choices[0].delta.content)
            if seen == 5:
                await stream.close()
                break
    event = (await events.of("acme", 2))[-1]
    assert Outcome.from_wire(event.data.outcome) is Outcome.CANCELLED
    assert event.data.input_tokens == prompt
    assert 5 <= event.data.output_tokens < 60


async def test_leaving_after_the_finish_is_a_completed_request(mesh: Mesh, events: Events) -> None:
    """Case B35 (b): everything was read but [DONE]: one event, done, the full count."""
    async with client_of(mesh) as client:
        stream = await client.chat.completions.create(model="story", messages=HELLO, stream=True, max_tokens=6)
        async for chunk in stream:
            if chunk.choices[0].finish_reason is not None:
                await stream.close()
                break
    [event] = await events.of("acme")
    assert Outcome.from_wire(event.data.outcome) is Outcome.DONE
    assert event.data.output_tokens == 6


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
    ],
)
async def test_a_bad_parameter_stops_nobody_else(mesh: Mesh, wish: dict[str, Any], param: str) -> None:
    """Case B41: 400 with the parameter named; the other tenant's request right after is answered."""
    async with client_of(mesh) as client, client_of(mesh, "globex") as other:
        with pytest.raises(BadRequestError) as refused:
            await whole(client, model="tiny-1", **wish)
        assert refused.value.param == param
        assert (await whole(other, model="tiny-1", max_tokens=2)).choices[0].finish_reason is not None


async def test_choices_and_logprobs_of_a_real_engine(mesh: Mesh) -> None:
    """Two seeded choices differ and repeat; logprobs are those of the tokens that make the text."""
    wish: dict[str, Any] = {"model": "tiny-1", "n": 2, "seed": 5, "temperature": 1.5, "max_tokens": 8}
    async with client_of(mesh) as client:
        first, again = await whole(client, **wish), await whole(client, **wish)
        texts = [choice.message.content for choice in first.choices]
        assert texts == [choice.message.content for choice in again.choices]
        assert texts[0] != texts[1]
        told = await whole(client, model="words", logprobs=True, top_logprobs=2)
        entries = told.choices[0].logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries)[: len(ANSWER.encode())] == ANSWER.encode()
        assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_models_and_adapters(mesh: Mesh) -> None:
    """The list is the tenant's own; an adapter answers under its name; unknown models are 404."""
    async with client_of(mesh) as client, client_of(mesh, "globex") as other:
        mine = [model.id async for model in client.models.list()]
        theirs = [model.id async for model in other.models.list()]
        assert {"acme-only", "tiny-1-lora"} <= set(mine)
        assert not {"acme-only", "tiny-1-lora"} & set(theirs)
        assert (await whole(client, model="tiny-1-lora", max_tokens=2)).model == "tiny-1-lora"
        with pytest.raises(NotFoundError):
            await whole(client, model="absent")


async def test_an_echoed_prompt_is_scored(mesh: Mesh) -> None:
    """As evaluation harnesses ask: `echo` with `logprobs`. Every token of prompt and completion has a place, the first
    has no probability, offsets cut the text; streamed it is the same; a model that cannot refuses with its `param`."""
    asked: Any = {"prompt": "every engine", "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    async with client_of(mesh) as client:
        told = await client.completions.create(model="tiny-1", **asked)
        [choice] = told.choices
        scores = choice.logprobs
        assert scores is not None
        assert choice.text.startswith(asked["prompt"])
        assert len(scores.tokens) == told.usage.prompt_tokens + told.usage.completion_tokens
        assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
        assert all(score is not None and score <= 0 for score in scores.token_logprobs[1:])
        assert all(
            1 <= len(top) <= 2 for top in scores.top_logprobs[1:]
        )  # by text: two halves of characters look alike
        assert scores.text_offset == sorted(scores.text_offset)
        again = await client.completions.create(model="tiny-1", **asked, stream=True)
        pieces = [piece.choices[0] async for piece in again if piece.choices]
        assert "".join(piece.text for piece in pieces) == choice.text
        streamed = [score for piece in pieces if piece.logprobs for score in piece.logprobs.token_logprobs]
        assert streamed[1:] == pytest.approx(scores.token_logprobs[1:])
        with pytest.raises(BadRequestError) as refused:
            await client.completions.create(model="story", **asked)
        assert refused.value.param == "echo"
