"""Every way a request can end: what is settled, finished and billed. On virtual time, over fakes."""

import asyncio

import pytest

from roundhouse.catalogue.records import Limits
from roundhouse.errors import (
    CapacityExhausted,
    DeadlinePassed,
    EngineFailed,
    InvalidInput,
    LimitExceeded,
    RoundhouseError,
    Unavailable,
)
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.heartbeat import beat
from services.gateway.operations.run import Waiting
from services.gateway.operations.run_request import run_request
from tests.fakes.clock import EPOCH_MS
from tests.unit.gateway.gateway_world import T1, GatewayWorld
from tests.unit.gateway.scenarios import billed, collect, in_world, the_event


def test_tokens_streamed_are_tokens_settled_finished_and_billed() -> None:
    """Invariant 13: 10 prompt tokens and 3 of output are the same numbers everywhere."""

    async def scenario(world: GatewayWorld) -> None:
        events = await collect(world)
        assert len(events) == 3

    world = in_world(scenario)
    event = the_event(world)
    assert billed(event) == (Outcome.DONE, 10, 3)
    assert (event.id, event.source, event.subject) == ("r1/1", "c", "t1")
    assert event.data.cached_tokens == 4
    assert (event.data.queue_ms, event.data.stage_ms, event.data.load_ms) == (7, 5, 3)
    assert event.data.status == 200
    [finished] = world.scheduler.finishes
    assert (finished.input_tokens, finished.cached_tokens, finished.output_tokens) == (10, 4, 3)
    assert finished.lease_id == "lease-r1-1"
    assert world.scheduler.cancelled == []


def test_choices_share_one_grant_and_one_prompt() -> None:
    """Two choices of 3 tokens over a prompt of 10 bill 10 + 6, in one event."""

    async def scenario(world: GatewayWorld) -> None:
        assert len(await collect(world, choices=2)) == 6

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.DONE, 10, 6)
    assert len(world.scheduler.submitted) == 1
    assert world.scheduler.submitted[0].max_output_tokens == 6


def test_a_waiting_request_is_told_every_two_seconds_and_never_fails_early() -> None:
    """Granted after 5 s, it hears of its place at 2 s and 4 s, with what is left of an estimate of 3 s."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.grants_at_once = False
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(5)
        assert world.scheduler.grant(world.scheduler.submitted[0])
        events = await task
        waits = [event for event in events if isinstance(event, Waiting)]
        assert waits == [Waiting("queued", 2, 1_000), Waiting("queued", 2, 0)]

    in_world(scenario)


def test_the_scheduler_is_reminded_of_a_request_that_waits_long() -> None:
    """Submitted again after 10 s and 20 s, as the same attempt and without a fallback; what is answered ends nothing,
    also not when the scheduler is away. A store that a failover made forget the request queues it so."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.grants_at_once = False
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(9)
        assert len(world.scheduler.submitted) == 1
        world.scheduler.refused = wire.Refused(reason=wire.Refused.REASON_DEADLINE)
        await asyncio.sleep(2)
        world.scheduler.away = True
        await asyncio.sleep(10)
        world.scheduler.away = False
        await asyncio.sleep(10)
        first, *more = world.scheduler.submitted
        assert [(each.request_id, each.attempt, each.fallback_allowed) for each in more] == [("r1", 1, False)] * 2
        assert world.scheduler.grant(first)
        await task

    assert billed(the_event(in_world(scenario))) == (Outcome.DONE, 10, 3)


def test_leaving_while_queued_takes_the_request_out_and_bills_nothing() -> None:
    """Case B35 (c): one cancelled event of 0 tokens, the queue entry cancelled, the reservation returned."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.grants_at_once = False
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert not world.scheduler.grant(world.scheduler.submitted[0]), "a late grant is not wanted"

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.CANCELLED, 0, 0)
    assert [cancel.request_id for cancel in world.scheduler.cancelled] == ["r1"]
    assert world.node.calls == []
    assert the_event(world).data.status == 499


def test_leaving_while_running_bills_what_was_generated_and_stops_the_engine() -> None:
    """Case B35 (a): 5 tokens of 100 came, one every 10 ms, so the event says cancelled, 10 + 5."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.interval_ms = 10
        task = asyncio.create_task(collect(world, output_tokens=100))
        await asyncio.sleep(0.055)
        task.cancel()
        await asyncio.wait((task,))

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.CANCELLED, 10, 5)
    assert world.node.cancelled == 1
    assert world.scheduler.finishes[0].output_tokens == 5
    assert world.scheduler.finishes[0].outcome == wire.Finished(outcome=Outcome.CANCELLED.to_wire()).outcome


def test_a_body_that_stops_reading_closes_the_engine_stream_at_once() -> None:
    """Leaving the context between two pieces cancels on the node before the settlement."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.interval_ms = 10
        async with run_request(world.parts, world.work(output_tokens=100)) as run:
            async for _ in run.events():
                break

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.CANCELLED, 10, 1)
    assert world.node.cancelled == 1


def test_leaving_after_the_last_token_is_a_completed_request() -> None:
    """Case B35 (b): whoever read everything and closes before [DONE] is read has completed."""

    async def scenario(world: GatewayWorld) -> None:
        async def read_and_leave() -> None:
            async with run_request(world.parts, world.work()) as run:
                async for _ in run.events():
                    pass
                await asyncio.Event().wait()  # the connection that never takes [DONE]

        task = asyncio.create_task(read_and_leave())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait((task,))

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.DONE, 10, 3)
    assert world.observer.endings[0].outcome is Outcome.DONE


def test_a_deadline_in_the_queue_costs_nothing() -> None:
    """Case B14: at 1 s the request expires; no engine call, 0 tokens, the queue entry cancelled."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.grants_at_once = False
        began_ms = world.clock.monotonic_ms()
        with pytest.raises(DeadlinePassed):
            await collect(world, deadline_ms=1_000)
        assert world.clock.monotonic_ms() - began_ms == 1_000

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.EXPIRED, 0, 0)
    assert the_event(world).data.status == 504
    assert world.node.calls == []
    assert len(world.scheduler.cancelled) == 1


def test_a_hanging_engine_is_bounded_by_the_deadline() -> None:
    """After 2 tokens nothing comes: at the deadline of 30 s the stream is closed and 10 + 2 are billed as expired."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.hang_after = 2
        with pytest.raises(DeadlinePassed):
            await collect(world, deadline_ms=30_000)

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.EXPIRED, 10, 2)
    assert world.node.cancelled == 1


def test_a_load_that_outlasts_a_tensor_call_is_told_to_come_again() -> None:
    """Case B04 (c): while the load is held, the tensor client gets unavailable with a delay, not a deadline."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.grants_at_once = False
        world.scheduler.accepted = wire.Accepted(cold=True)
        with pytest.raises(CapacityExhausted) as raised:
            await collect(world, world.tensor_work(deadline_ms=500))
        assert raised.value.retry_after_ms == 5_000

    in_world(scenario)


def test_a_failure_after_tokens_is_not_tried_again() -> None:
    """Case B29: 3 tokens came; the event says failed with 10 + 3, and the error reaches the client."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after = 3
        with pytest.raises(EngineFailed):
            await collect(world, output_tokens=8)

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.FAILED, 10, 3)
    assert the_event(world).data.status == 502


def test_one_failing_choice_ends_the_others() -> None:
    """With two choices the first failure ends the request once, and no stream stays open."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failures_left, world.node.interval_ms = 2, 1, 10
        with pytest.raises(EngineFailed):
            await collect(world, output_tokens=8, choices=2)

    world = in_world(scenario)
    assert len(world.usage.recorded) == 1
    assert Outcome.from_wire(world.usage.recorded[0].data.outcome) is Outcome.FAILED


def test_what_the_engine_calls_the_callers_fault_is_not_tried_again() -> None:
    """An engine that refuses a parameter refuses it the second time too."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failure = 0, InvalidInput("no", param="logit_bias")
        with pytest.raises(InvalidInput):
            await collect(world)

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.FAILED, 0, 0)
    assert len(world.scheduler.submitted) == 1


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (wire.Refused.REASON_QUEUE_FULL, LimitExceeded),
        (wire.Refused.REASON_NEVER_FITS, InvalidInput),
        (wire.Refused.REASON_DEADLINE, DeadlinePassed),
        (wire.Refused.REASON_UNAVAILABLE, CapacityExhausted),
        (wire.Refused.REASON_MODEL_UNKNOWN, Unavailable),
    ],
)
def test_a_refusal_changes_no_counter(reason: wire.Refused.Reason.ValueType, error: type[RoundhouseError]) -> None:
    """Invariant 15: after a refusal the minute has as much room as before, and there is no usage event."""

    async def scenario(world: GatewayWorld) -> None:
        limits = Limits(requests_per_minute=10, tokens_per_minute=100)
        world.scheduler.refused = wire.Refused(reason=reason, retry_after_ms=1_500)
        with pytest.raises(error):
            await collect(world, world.work(limits=limits))
        assert world.admission.uses[T1].requests.points == 0
        assert world.admission.uses[T1].tokens.points == 0

    world = in_world(scenario)
    assert world.usage.recorded == []
    assert world.scheduler.cancelled == []


def test_a_queued_request_that_is_given_back_fails_with_the_reason() -> None:
    """A rejection after acceptance (the load failed) ends the request as failed, with 0 tokens and no cancel."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.grants_at_once = False
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(1)
        refused = wire.Refused(reason=wire.Refused.REASON_UNAVAILABLE, retry_after_ms=900)
        assert world.scheduler.reject(world.scheduler.submitted[0], refused)
        with pytest.raises(CapacityExhausted):
            await task

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.FAILED, 0, 0)
    assert world.scheduler.cancelled == []


def test_a_scheduler_that_is_away_refuses_new_work_and_charges_nothing() -> None:
    """Five tries, then unavailable; no event, nothing held."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.away = True
        with pytest.raises(Unavailable):
            await collect(world)

    assert in_world(scenario).usage.recorded == []


def test_a_control_plane_that_goes_away_does_not_end_a_running_stream() -> None:
    """Invariant 18: scheduler and store vanish after the first token; all 50 arrive, and the settlement is kept."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.interval_ms = 10
        received = 0
        async with run_request(world.parts, world.work(output_tokens=50)) as run:
            async for _ in run.events():
                received += 1
                world.scheduler.away = world.admission.away = True
        assert received == 50
        assert len(world.settlements) == 1
        world.admission.away = False
        await world.settlements.retry()
        assert len(world.settlements) == 0

    world = in_world(scenario)
    assert billed(the_event(world)) == (Outcome.DONE, 10, 50)
    heartbeat = world.attempts.heartbeat(EPOCH_MS + 1_000)
    assert heartbeat is not None
    assert [finished.output_tokens for finished in heartbeat.finished] == [50], "the lost finish is repeated"


def test_no_work_is_taken_while_usage_has_no_place_to_go() -> None:
    """A full outbox refuses before anything is spent."""

    async def scenario(world: GatewayWorld) -> None:
        world.usage.has_room = False
        with pytest.raises(Unavailable):
            await collect(world)

    world = in_world(scenario)
    assert world.scheduler.submitted == []


def test_a_repeated_grant_is_wanted_while_the_request_runs_and_not_after() -> None:
    """Grants are repeated until acknowledged; only one stream is opened."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.interval_ms = 10
        async with run_request(world.parts, world.work(output_tokens=3)) as run:
            async for _ in run.events():
                if run.is_open:
                    assert world.scheduler.grant(world.scheduler.submitted[0])
        assert not world.scheduler.grant(world.scheduler.submitted[0])

    world = in_world(scenario)
    assert len(world.node.calls) == 1


def test_heartbeats_carry_the_progress_of_granted_attempts() -> None:
    """After 5 tokens the lease says 10 + 5, so that a scheduler can settle a gateway that dies."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.interval_ms = 10
        seen = 0
        async with run_request(world.parts, world.work(output_tokens=9)) as run:
            async for _ in run.events():
                seen += 1
                if seen == 5:
                    heartbeat = world.attempts.heartbeat(world.clock.now_ms())
                    assert heartbeat is not None
                    [lease] = heartbeat.leases
                    assert (lease.input_tokens, lease.output_tokens) == (10, 5)

    in_world(scenario)


def test_heartbeats_of_many_requests_come_in_pieces() -> None:
    """4,500 finishes that are repeated: three messages, each below what the bus takes (1 MB), and none is missing."""

    async def scenario(world: GatewayWorld) -> None:
        for number in range(4_500):
            finished = wire.Finished(request_id=f"{number:032}", attempt=1, lease_id=f"{number:034}", pool="shared")
            world.attempts.remember(finished, world.clock.now_ms())
        await beat(world.attempts, world.scheduler, world.clock)

    sent = in_world(scenario).scheduler.heartbeats
    assert [len(message.finished) for message in sent] == [2_000, 2_000, 500]
    assert all(message.ByteSize() < 1_000_000 for message in sent)
    assert len({finished.request_id for message in sent for finished in message.finished}) == 4_500
