"""What no port promises: errors of other kinds, clean-up that fails, engines that go on. Nothing stays held, all is
settled and billed once. On virtual time, over fakes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from roundhouse.errors import EngineFailed, InvalidInput, Unavailable
from roundhouse.vocabulary import Outcome, RequestId, TenantId
from roundhouse.wire.v1.scheduling_pb2 import Finished, Placement, SubmitReply, SubmitRequest
from services.gateway.adapters.http_requests import DEADLINE_MS_MAX, deadline_ms_of
from services.gateway.adapters.idempotent_answers import IdempotentAnswer
from services.gateway.adapters.kserve_bodies import parse_infer
from services.gateway.domain.idempotency import Claim, Claimed
from services.gateway.operations import settlements
from services.gateway.operations.attempts import Attempts
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.operations.run_request import run_request
from services.gateway.ports import Admitted, EngineChunk, EngineRequest
from tests.fakes.answer_store import InMemoryAnswerStore
from tests.fakes.inference_node import FakeNode
from tests.unit.gateway.gateway_world import T1, GatewayWorld
from tests.unit.gateway.scenarios import billed, collect, in_world, the_event


class FailingCleanUp(FakeNode):
    """An engine stream that cannot be closed in order."""

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """As the fake's, with a fault at the end."""
        try:
            async for chunk in super().generate(placement, request, timeout_ms=timeout_ms):
                yield chunk
        finally:
            raise OSError("the connection is in a state that nobody thought of")


class TalkingOn(FakeNode):
    """An engine that fails, or says nothing more, after its last piece."""

    hangs = False

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """As the fake's, and then not its end."""
        async for chunk in super().generate(placement, request, timeout_ms=timeout_ms):
            yield chunk
        if self.hangs:
            await asyncio.sleep(50)
        raise EngineFailed("the connection was lost")


def with_node(world: GatewayWorld, node: FakeNode) -> None:
    """Have requests run there."""
    node.interval_ms = 10
    world.node = node
    world.parts = type(world.parts)(
        **{name: getattr(world.parts, name) for name in world.parts.__slots__ if name != "node"}, node=node
    )


def test_a_clean_up_that_fails_keeps_neither_lease_nor_bill() -> None:
    """The client leaves after 5 tokens and closing the engine stream raises: the attempt is finished, its event says
    cancelled with 10 + 5, and the admission is settled. Heartbeats would else hold its slot for ever."""

    async def scenario(world: GatewayWorld) -> None:
        with_node(world, FailingCleanUp())
        async with run_request(world.parts, world.work(output_tokens=100)) as run:
            events = run.events()
            for _ in range(5):
                await anext(events)

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.CANCELLED, 10, 5)
    assert [finished.output_tokens for finished in world.scheduler.finishes] == [5]


def test_a_submission_that_fails_for_no_known_reason_holds_nothing() -> None:
    """The request cannot even be written: its attempt is forgotten and its admission withdrawn."""

    async def scenario(world: GatewayWorld) -> None:
        async def broken(_request: SubmitRequest, **_: Any) -> SubmitReply:
            raise ValueError("a number is out of range")

        world.scheduler.submit = broken  # type: ignore[assignment]
        with pytest.raises(ValueError, match="out of range"):
            await collect(world)

    assert in_world(scenario).usage.recorded == []


@pytest.mark.parametrize("hangs", [False, True])
def test_what_an_engine_does_after_the_last_piece_is_nobodys_loss(hangs: bool) -> None:
    """All three tokens came with the reason why they end, and then the connection is lost, or stays silent: the client
    has had everything, was billed for it, and is told neither of an error nor to wait."""

    async def scenario(world: GatewayWorld) -> None:
        node = TalkingOn()
        node.hangs = hangs
        with_node(world, node)
        began_ms = world.clock.monotonic_ms()
        assert len(await collect(world)) == 3
        assert world.clock.monotonic_ms() - began_ms < 1_000

    assert billed(the_event(in_world(scenario))) == (Outcome.DONE, 10, 3)


def test_a_settlement_that_waits_is_not_dropped_for_one_that_was_just_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two, A and B wait; while A is being settled C cannot be, and pushes A out. B and C are left."""
    monkeypatch.setattr(settlements, "WAITING_MAX", 2)

    async def scenario(world: GatewayWorld) -> None:
        waiting, settled = settlements.Settlements(world.admission), list[str]()
        a, b, c = (admitted(name) for name in "abc")

        async def slowly(given: Admitted, **_: Any) -> None:
            settled.append(given.ticket)
            if given.ticket != "c" and settled.count("a") > 1:
                await asyncio.sleep(1)
            if settled.count(given.ticket) == 1:
                raise Unavailable("the store is away")

        world.admission.settle = slowly  # type: ignore[assignment]
        for each in (a, b):
            await waiting.settle(each, used_tokens=1)
        retrying = asyncio.create_task(waiting.retry())
        await asyncio.sleep(0.5)
        await waiting.settle(c, used_tokens=1)
        await retrying
        assert settled == ["a", "b", "a", "c", "b", "c"]
        assert len(waiting) == 0

    in_world(scenario)


def admitted(name: str) -> Admitted:
    """A request that passed every limit."""
    return Admitted(RequestId(name), T1, 1, None, None, 0, 0)


def test_a_clock_that_steps_back_does_not_have_finishes_repeated_for_ever() -> None:
    """They are repeated for five seconds; after a step of an hour they would be for an hour, and pile up."""
    attempts = Attempts("g1")
    attempts.remember(Finished(request_id="r1"), 10_000_000)
    assert attempts.heartbeat(10_004_000) is not None
    assert attempts.heartbeat(10_000_000 - 3_600_000) is None


@pytest.mark.parametrize("ending", ["the client leaves", "the store answers too late"])
def test_a_claim_whose_answer_nobody_got_is_given_back(ending: str) -> None:
    """The store has noted that a key is taken, and its word is lost: the client's next try is not held up by it for the
    fifteen seconds that a claim lives."""

    async def scenario(world: GatewayWorld) -> None:
        class Deaf(InMemoryAnswerStore):
            async def claim(self, tenant_id: TenantId, key: str, fingerprint: str, owner: str) -> Claim:
                await super().claim(tenant_id, key, fingerprint, owner)
                if ending == "the client leaves":
                    await asyncio.sleep(60)
                raise Unavailable("the store did not run answers.lua")

        async def leaves() -> dict[str, Any]:
            await asyncio.sleep(1)
            return {"type": "http.disconnect"}

        async def nothing(*_: Any) -> None:
            raise AssertionError("nothing is run, and nothing is sent")

        store = Deaf(world.clock)
        context = RequestContext(RequestId("r1"), world.caller, world.clock.now_ms() + 60_000)
        answer = IdempotentAnswer(nothing, store, world.clock, context, "key", "print")
        with suppress(Unavailable):
            await answer({"type": "http"}, leaves, nothing)
        assert isinstance(await InMemoryAnswerStore.claim(store, T1, "key", "print", "another"), Claimed)

    in_world(scenario)


@pytest.mark.parametrize("text", ["000000000001" + "9" * 30, "0" * 5_000 + "1", "0", "-1", "1.5", "٣", "3600001", ""])
def test_a_deadline_is_a_small_number_however_it_is_written(text: str) -> None:
    """Leading zeros once hid a number of 30 digits behind the limit, and one of 5,000 was a fault of ours."""
    with pytest.raises(InvalidInput):
        deadline_ms_of(text, 1)
    assert deadline_ms_of(str(DEADLINE_MS_MAX), 1) == DEADLINE_MS_MAX


@pytest.mark.parametrize("length", ["0" * 17 + "19", "0" * 17 + "1" + "0" * 5_000])
def test_a_header_length_is_within_the_body_however_it_is_written(length: str) -> None:
    """Case B43: 19 behind zeros is more than the 13 bytes that there are; 5,000 digits are too."""
    with pytest.raises(InvalidInput):
        parse_infer(b'{"inputs":[]}', length)
