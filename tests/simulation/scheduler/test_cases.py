"""Cases from public reports, on virtual time: production domain and operations, fake bus, store, nodes and gateways."""

import asyncio
from collections.abc import Awaitable, Callable

from roundhouse.wire.v1 import scheduling_pb2 as wire
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus
from tests.fakes.scheduling_store import InMemorySchedulingStore
from tests.simulation.scheduler.harness import World, world_on
from tests.simulation.scheduler.mesh import POOL, model


def simulate(story: Callable[[World], Awaitable[None]]) -> None:
    """Run a story in a fresh world on virtual time."""

    async def run() -> None:
        async with world_on(FakeBus(), InMemorySchedulingStore(), VirtualClock()) as world:
            await story(world)

    run_virtual(run())


def test_one_cold_model_is_loaded_once_for_all_who_wait() -> None:
    """B17: twenty callers of a cold model cause one load (invariant 7) and all run; the wait names the load."""

    async def story(world: World) -> None:
        cold = model("cold", slots=20)
        world.offer(cold)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        requests = [gateway.ask(f"r{number}", cold) for number in range(20)]
        replies = await asyncio.gather(*(gateway.submit(each) for each in requests))
        assert all(reply is not None and reply.accepted.cold for reply in replies)
        await asyncio.sleep(5)
        assert gateway.outcomes() == {"done": 20}
        assert node.loads == ["cold"]
        grant = requests[0].grant
        assert grant is not None
        assert grant.load_ms == 1_000
        assert grant.queue_ms + grant.load_ms + grant.stage_ms < 1_500

    simulate(story)


def test_two_models_take_turns_in_room_for_one() -> None:
    """B24: room for one model, ten requests for P and ten for Q at once, 2 s each: all run, at most six loads."""

    async def story(world: World) -> None:
        p, q = model("p", slots=1), model("q", slots=1)
        world.offer(p, q)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        requests = [gateway.ask(f"{m.name}{n}", m, run_ms=2_000) for n in range(10) for m in (p, q)]
        await asyncio.gather(*(gateway.submit(each) for each in requests))
        await asyncio.sleep(100)
        assert gateway.outcomes() == {"done": 20}
        assert 2 <= len(node.loads) <= 6
        assert node.instances_max == 1

    simulate(story)


def test_a_busy_model_does_not_keep_a_cold_one_out() -> None:
    """A model under endless load gives its memory up after its quantum, so the cold one has a bounded wait."""

    async def story(world: World) -> None:
        hot, cold = model("hot"), model("cold")
        world.offer(hot, cold)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)

        async def endless() -> None:
            for number in range(400):
                asked = gateway.ask(f"h{number}", hot, run_ms=1_000)
                await gateway.submit(asked)
                await asyncio.sleep(0.25)

        busy = asyncio.create_task(endless())
        await asyncio.sleep(20)
        asked = gateway.ask("c", cold)
        await gateway.submit(asked)
        await asyncio.sleep(10)
        # 2 s of patience, at most 1 s for running requests, 1 s of load, two ticks.
        assert asked.granted_ms - asked.submitted_ms <= 4_500
        await busy
        await asyncio.sleep(130)
        assert gateway.outcomes()["done"] >= 300
        assert node.loads[:3] == ["hot", "cold", "hot"]

    simulate(story)


def test_a_model_larger_than_the_machine_is_refused_at_once() -> None:
    """B22: capacity 400 with three of 100: 500 is refused with no eviction; 350 evicts just enough and runs."""

    async def story(world: World) -> None:
        small = [model(f"m{n}") for n in range(3)]
        huge, big = model("huge", device_bytes=500), model("big", device_bytes=350)
        world.offer(*small, huge, big)
        node, gateway = await world.node(capacity=400), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for each in small:
            await gateway.submit(gateway.ask(each.name, each, run_ms=3_000))
        await asyncio.sleep(2)
        for number in range(10):
            before_ms = world.clock.now_ms()
            reply = await gateway.submit(gateway.ask(f"x{number}", huge))
            assert reply is not None
            assert reply.refused.reason == wire.Refused.REASON_NEVER_FITS
            assert world.clock.now_ms() - before_ms < 1_000
        assert node.unloads == []
        await gateway.submit(gateway.ask("big", big))
        await asyncio.sleep(10)
        # 350 needs 250 more than the 100 that are free: three models of 100.
        assert sorted(node.unloads) == ["m0", "m1", "m2"]
        assert gateway.outcomes() == {"done": 4, "refused": 10}

    simulate(story)


def test_eviction_takes_just_enough_and_the_least_recently_used() -> None:
    """B22: one victim is enough for 200 in 400 with three of 100, and it is the one used longest ago."""

    async def story(world: World) -> None:
        small = [model(f"m{n}") for n in range(3)]
        medium = model("medium", device_bytes=200)
        world.offer(*small, medium)
        node, gateway = await world.node(capacity=400), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for name in (1, 0, 2):
            await gateway.submit(gateway.ask(f"r{name}", small[name]))
            await asyncio.sleep(2)
        await gateway.submit(gateway.ask("medium", medium))
        await asyncio.sleep(5)
        assert node.unloads == ["m1"]

    simulate(story)


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    """B13: 1000 tokens against a pool of 256 (and a context + 1): refused, never queued; short ones run."""

    async def story(world: World) -> None:
        tight = model("tight", kv_pool_tokens=256, context_tokens=4096)
        world.offer(tight)
        await world.node()
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for number, tokens in enumerate((1_000, 4_097)):
            reply = await gateway.submit(gateway.ask(f"x{number}", tight, input_tokens=tokens))
            assert reply is not None
            assert reply.refused.reason == wire.Refused.REASON_NEVER_FITS
        for number, tenant in enumerate(("t1", "t2")):
            await gateway.submit(gateway.ask(f"s{number}", tight, tenant_id=tenant))
        await asyncio.sleep(3)
        assert gateway.outcomes() == {"refused": 2, "done": 2}
        assert (await world.store.snapshot(POOL, world.clock.now_ms())).depths == ()

    simulate(story)


def test_a_deadline_that_passes_in_the_queue_is_told_on_time() -> None:
    """B14: one slot busy for 5 s; a request with a 1 s deadline is rejected at about 1 s and never runs."""

    async def story(world: World) -> None:
        single = model("single", slots=1)
        world.offer(single)
        await world.node()
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("long", single, run_ms=5_000))
        await asyncio.sleep(1.5)
        late = gateway.ask("late", single, deadline_unix_ms=world.clock.now_ms() + 1_000)
        await gateway.submit(late)
        gone = gateway.ask("gone", single)
        await gateway.submit(gone)
        await asyncio.sleep(0.5)
        await gateway.cancel(gone)
        await asyncio.sleep(6)
        assert late.endings == ["REASON_DEADLINE"]
        assert 1_000 <= late.ended_ms - late.submitted_ms <= 1_300
        assert gateway.outcomes() == {"done": 1, "REASON_DEADLINE": 1, "cancelled": 1}

    simulate(story)


def test_a_model_that_fails_to_load_is_told_with_its_cause() -> None:
    """B18: callers of a broken model are refused after bounded tries; another model loads; mended, it works again."""

    async def story(world: World) -> None:
        bad, good = model("bad"), model("good")
        world.offer(bad, good)
        node, gateway = await world.node(), await world.gateway()
        node.broken.add("bad")
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        waiting = gateway.ask("b1", bad)
        await gateway.submit(waiting)
        await asyncio.sleep(15)
        # Three tries of 1 s with pauses of 1 s and 2 s between them, each pause noticed within two ticks.
        assert waiting.endings == ["REASON_UNAVAILABLE"]
        assert waiting.ended_ms - waiting.submitted_ms <= 7_500
        assert node.loads == ["bad"] * 3
        reply = await gateway.submit(gateway.ask("b2", bad))
        if reply is not None and reply.WhichOneof("result") == "refused":
            assert "the weights file is empty" in reply.refused.message
            assert reply.refused.retry_after_ms > 0
        await gateway.submit(gateway.ask("g", good))
        await asyncio.sleep(5)
        assert gateway.asked[("g", 1)].endings == ["done"]
        node.broken.clear()
        await asyncio.sleep(60)
        await gateway.submit(gateway.ask("b3", bad))
        await asyncio.sleep(10)
        assert gateway.asked[("b3", 1)].endings == ["done"]

    simulate(story)


def test_a_silent_node_gets_no_new_work_within_two_seconds() -> None:
    """A node that says nothing is out 1.9 s after its last word: what comes waits, with the reason, for a loader that
    may be back; after 10 s it is refused."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("a", m))
        await asyncio.sleep(3)
        node.silent = True
        await asyncio.sleep(1.9)
        waits = gateway.ask("b", m, deadline_unix_ms=world.clock.now_ms() + 5_000)
        reply = await gateway.submit(waits)
        assert reply is not None
        assert reply.accepted.reason == "no healthy node may load it now"
        await asyncio.sleep(8.5)
        assert waits.endings == ["REASON_DEADLINE"]
        reply = await gateway.submit(gateway.ask("c", m))
        assert reply is not None
        assert reply.refused.reason == wire.Refused.REASON_UNAVAILABLE

    simulate(story)


def test_a_request_whose_only_node_died_waits_for_it_and_a_new_one_is_refused() -> None:
    """Case B29 on one node: its Triton is away and its loader says so. The second attempt of a request that ran there
    waits, and runs when the node accepts work again; a request that was never accepted is refused at once."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("a", m))
        await asyncio.sleep(3)
        node.accepting = False
        await asyncio.sleep(1.1)
        again = gateway.ask("a", m, attempt=2)
        reply = await gateway.submit(again)
        assert reply is not None
        assert reply.WhichOneof("result") == "accepted"
        refused = await gateway.submit(gateway.ask("new", m))
        assert refused is not None
        assert refused.refused.reason == wire.Refused.REASON_UNAVAILABLE
        await asyncio.sleep(5)
        assert again.endings == []
        node.accepting = True
        await asyncio.sleep(5)
        assert again.endings == ["done"]

    simulate(story)


def test_fifty_callers_that_leave_lower_what_they_raised() -> None:
    """B46: the slot is busy; fifty queue and leave, twice. The depth is fifty, then zero within 2 s, and the gauge says
    so too; afterwards a new request runs at once."""

    async def story(world: World) -> None:
        single = model("single", slots=1)
        world.offer(single)
        await world.node()
        gateway = await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("long", single, run_ms=20_000))
        await asyncio.sleep(2)
        for turn in range(2):
            callers = [gateway.ask(f"{turn}c{n}", single, tenant_id=f"t{n % 4}") for n in range(50)]
            await asyncio.gather(*(gateway.submit(each) for each in callers))
            assert await depth(world) == 50
            await asyncio.gather(*(gateway.cancel(each) for each in callers))
            await asyncio.sleep(2)
            assert await depth(world) == 0
            assert sum(world.instruments.waits.get(POOL, {}).values()) == 0
        await asyncio.sleep(18)
        assert (await world.store.snapshot(POOL, world.clock.now_ms())).in_use == {}
        asked = gateway.ask("next", single)
        await gateway.submit(asked)
        await asyncio.sleep(1)
        assert asked.granted_ms - asked.submitted_ms < 100
        assert gateway.outcomes() == {"done": 2, "cancelled": 100}

    simulate(story)


async def depth(world: World) -> int:
    """Requests that wait, as the store says."""
    state = await world.store.snapshot(POOL, world.clock.now_ms())
    return sum(each.waiting for each in state.depths)


def test_callers_that_leave_a_cold_model_or_a_stream_lower_what_they_raised() -> None:
    """B46: fifty leave while the model is loaded for them, and two amid their streams: nothing waits, nothing runs, and
    the next caller is served at once by the instance that was loaded."""

    async def story(world: World) -> None:
        cold = model("cold", slots=2)
        world.offer(cold)
        node, gateway = await world.node(load_ms=5_000), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        callers = [gateway.ask(f"c{n}", cold, tenant_id=f"t{n % 4}") for n in range(50)]
        await asyncio.gather(*(gateway.submit(each) for each in callers))
        await asyncio.sleep(2)
        assert await depth(world) == 50
        await asyncio.gather(*(gateway.cancel(each) for each in callers))
        await asyncio.sleep(2)
        assert await depth(world) == 0
        assert sum(world.instruments.waits.get(POOL, {}).values()) == 0
        await asyncio.sleep(3)
        streams = [gateway.ask(f"s{n}", cold, run_ms=20_000) for n in range(2)]
        await asyncio.gather(*(gateway.submit(each) for each in streams))
        await asyncio.sleep(1)
        for each in streams:
            gateway.hang_up(each)
        await asyncio.sleep(2)
        assert (await world.store.snapshot(POOL, world.clock.now_ms())).in_use == {}
        asked = gateway.ask("next", cold)
        await gateway.submit(asked)
        await asyncio.sleep(1)
        assert asked.granted_ms - asked.submitted_ms < 100
        assert node.loads == ["cold"]
        assert gateway.outcomes() == {"cancelled": 52, "done": 1}

    simulate(story)
