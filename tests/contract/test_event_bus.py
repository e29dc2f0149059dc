"""What every `EventBus` does: the in-memory one and the one on a real NATS server."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js.errors import NotFoundError

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import AT_ONCE, EventBus, Message, NatsBus, connect_bus
from tests.fakes.event_bus import FakeBus


@pytest.fixture(params=["fake", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[EventBus]:
    """Both buses, connected."""
    if request.param == "fake":
        yield FakeBus()
        return
    real = await connect_bus(request.getfixturevalue("nats_url"), name="contract-test")
    yield real
    await real.close()


async def test_request_gets_the_answer_of_one_group_member(bus: EventBus) -> None:
    """A request reaches exactly one member of a queue group."""
    served: list[str] = []

    async def serve(name: str, message: Message) -> bytes:
        served.append(name)
        return message.data.upper()

    first = await bus.subscribe("rh.v1.test.echo", lambda message: serve("a", message), group="g")
    second = await bus.subscribe("rh.v1.test.echo", lambda message: serve("b", message), group="g")
    answers = [await bus.request("rh.v1.test.echo", b"ping") for _ in range(8)]
    assert answers == [b"PING"] * 8
    assert len(served) == 8
    await first.stop()
    await second.stop()


async def test_publish_reaches_every_subscriber_and_wildcards(bus: EventBus) -> None:
    """A publish reaches each subscriber once, also through `*`."""
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def note(name: str, message: Message) -> None:
        await seen.put(f"{name}:{message.data.decode()}")

    stops = [
        await bus.subscribe("rh.v1.node.n1.state", lambda message: note("exact", message)),
        await bus.subscribe("rh.v1.node.*.state", lambda message: note("star", message)),
    ]
    await bus.publish("rh.v1.node.n1.state", b"x")
    async with asyncio.timeout(60):
        got = {await seen.get(), await seen.get()}
    assert got == {"exact:x", "star:x"}
    for stop in stops:
        await stop.stop()


async def test_request_without_listener_is_unavailable(bus: EventBus) -> None:
    """Nobody listens: the caller is told, not left waiting."""
    with pytest.raises(Unavailable):
        await bus.request("rh.v1.test.nobody", b"", timeout_ms=300)


async def test_failing_handler_does_not_end_the_subscription(bus: EventBus) -> None:
    """One bad message is lost; the next one is answered."""

    async def handler(message: Message) -> bytes:
        if message.data == b"bad":
            raise ValueError("bad message")
        return b"ok"

    stop = await bus.subscribe("rh.v1.test.fragile", handler)
    with pytest.raises(Unavailable):
        await bus.request("rh.v1.test.fragile", b"bad", timeout_ms=200)
    assert await bus.request("rh.v1.test.fragile", b"good") == b"ok"
    await stop.stop()


async def test_concurrency_is_bounded(bus: EventBus) -> None:
    """At most `concurrency` handlers of one subscription run at once, and that many do."""
    running, peak = 0, 0
    gate = asyncio.Event()

    async def handler(_: Message) -> bytes:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 3:
            gate.set()
        async with asyncio.timeout(60):
            await gate.wait()
        running -= 1
        return b""

    stop = await bus.subscribe("rh.v1.test.bounded", handler, concurrency=3)
    await asyncio.gather(*(bus.request("rh.v1.test.bounded", b"") for _ in range(9)))
    assert peak == 3
    await stop.stop()


async def test_durable_publish_is_once_per_message_id(bus: EventBus) -> None:
    """The same message id is kept once by the stream."""
    for _ in range(3):
        await bus.publish_durable(subjects.usage("acme"), b"event", message_id="contract-1")
    if isinstance(bus, NatsBus):
        info = await bus.jetstream.stream_info(subjects.USAGE_STREAM, subjects_filter=subjects.usage("acme"))
        assert info.state.subjects == {subjects.usage("acme"): 1}
        await bus.jetstream.purge_stream(subjects.USAGE_STREAM)
        with pytest.raises(NotFoundError):
            await bus.jetstream.get_last_msg(subjects.USAGE_STREAM, subjects.usage("acme"))
    else:
        assert isinstance(bus, FakeBus)
        assert list(bus.durable) == ["contract-1"]


async def test_what_is_handled_at_once_is_answered_and_in_order(bus: EventBus) -> None:
    """500 requests at once to a handler that never waits: each gets its own answer, and they came in the order sent;
    after one that failed the handler still serves, and after `stop` nobody does."""
    came: list[bytes] = []

    async def serve(message: Message) -> bytes:
        came.append(message.data)
        if message.data == b"bad":
            raise ValueError
        return message.data + b"!"

    running = await bus.subscribe("rh.v1.test.once", serve, concurrency=AT_ONCE)
    sent = [b"%d" % number for number in range(500)]
    answers = await asyncio.gather(*[bus.request("rh.v1.test.once", data, timeout_ms=30_000) for data in sent])
    assert answers == [data + b"!" for data in sent]
    assert came == sent
    with pytest.raises(Unavailable):
        await bus.request("rh.v1.test.once", b"bad", timeout_ms=200)
    assert await bus.request("rh.v1.test.once", b"good", timeout_ms=30_000) == b"good!"
    await running.stop()
    with pytest.raises(Unavailable):
        await bus.request("rh.v1.test.once", b"late", timeout_ms=200)


async def test_much_that_is_published_at_once_arrives_whole_and_in_order(bus: EventBus) -> None:
    """20 MB in messages of 100 kB, faster than the socket takes them, then a small one: all come, in order."""
    came: list[bytes] = []
    complete = asyncio.Event()

    async def keep(message: Message) -> None:
        came.append(message.data[:4])
        if len(came) == 201:
            complete.set()

    await bus.subscribe("rh.v1.test.much", keep)
    for number in range(200):
        await bus.publish("rh.v1.test.much", b"%04d" % number + bytes(100_000))
    await bus.publish("rh.v1.test.much", b"last")
    async with asyncio.timeout(60):
        await complete.wait()
    assert came == [*(b"%04d" % number for number in range(200)), b"last"]
