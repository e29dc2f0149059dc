"""More models than fit, more requests than one instance can serve, unloads that a request meets. On virtual time."""

import asyncio

from tests.simulation.scheduler.fake_gateway import Asked
from tests.simulation.scheduler.harness import World
from tests.simulation.scheduler.mesh import POOL, model
from tests.simulation.scheduler.test_cases import simulate

QUANTUM_MS = 10_000  # the default of `rotation_seconds`
LOAD_MS = 1_000


def is_hit(asked: Asked) -> bool:
    """Whether it found its model: it waited for no load."""
    return asked.grant is not None and not asked.grant.load_ms and asked.granted_ms - asked.submitted_ms < LOAD_MS


def test_a_request_takes_back_an_unload_that_was_not_sent() -> None:
    """Invariant 9: while the replica that evicts is between the mark and the order, a request for the victim comes: the
    victim stays and serves it at once; the other model is loaded later, when that is done."""

    async def story(world: World) -> None:
        a, b = model("a"), model("b")
        world.offer(a, b)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("a1", a))
        await asyncio.sleep(3)
        late = gateway.ask("a2", a)
        store = world.store
        send, sent = store.send_drains, 0

        async def send_slowly(*arguments: object) -> bool:
            nonlocal sent
            sent += 1
            if sent == 1:
                await gateway.submit(late)
            return await send(*arguments)  # type: ignore[arg-type]

        store.send_drains = send_slowly  # type: ignore[method-assign, assignment]
        await gateway.submit(gateway.ask("b1", b))
        await asyncio.sleep(10)
        assert late.granted_ms - late.submitted_ms < 100
        assert node.loads == ["a", "b"]
        assert node.unloads == ["a"]
        assert gateway.outcomes() == {"done": 3}

    simulate(story)


def test_a_request_that_meets_an_unload_waits_for_the_reload() -> None:
    """Invariant 9: its model was sent away a moment ago. It waits, at most until the other model has had its time, and
    its own has been loaded again; it does not fail."""

    async def story(world: World) -> None:
        a, b = model("a"), model("b")
        world.offer(a, b)
        node, gateway = await world.node(load_ms=LOAD_MS), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("a1", a))
        await asyncio.sleep(15)
        await gateway.submit(gateway.ask("b1", b))
        await asyncio.sleep(0.2)
        assert node.unloads == ["a"]
        met = gateway.ask("a2", a)
        reply = await gateway.submit(met)
        assert reply is not None
        assert reply.accepted.cold
        await asyncio.sleep(30)
        # The rest of b's load, its quantum, its last run, the reload, and a tick or two.
        assert met.granted_ms - met.submitted_ms <= LOAD_MS + QUANTUM_MS + 100 + LOAD_MS + 700
        assert gateway.outcomes() == {"done": 3}
        state = await world.store.snapshot(POOL, world.clock.now_ms())
        assert state.depths == ()

    simulate(story)
