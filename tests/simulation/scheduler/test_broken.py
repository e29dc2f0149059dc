"""A model process that died inside Triton: its instance serves nobody any more, and its model runs again soon."""

import asyncio

from roundhouse.wire.v1 import loading_pb2
from tests.simulation.scheduler.harness import World
from tests.simulation.scheduler.mesh import FakeNode, model
from tests.simulation.scheduler.test_cases import simulate


def test_a_dead_instance_is_closed_unloaded_and_loaded_again() -> None:
    """One request meets the dead process; the next waits for a reload of 1 s on the same node."""

    async def story(world: World) -> None:
        world.offer(model("m"))
        node = await world.node()
        await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        await world.gateways[0].submit(world.gateways[0].ask("first", model("m")))
        await asyncio.sleep(3)
        node.dead.add("m")
        await world.gateways[0].submit(world.gateways[0].ask("dies", model("m")))
        await asyncio.sleep(1)
        assert node.unloads == ["m"]
        asked = world.gateways[0].ask("after", model("m"))
        await world.gateways[0].submit(asked)
        await asyncio.sleep(3)
        assert asked.endings == ["done"]
        assert node.loads == ["m", "m"]

    simulate(story)


def test_a_dead_instance_that_does_not_leave_is_replaced_on_another_node() -> None:
    """The unload is never confirmed: the model is loaded on the other node, and its old memory stays counted."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        nodes = {name: await world.node(name) for name in ("n1", "n2")}
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("first", m))
        await asyncio.sleep(3)
        holder = next(node for node in nodes.values() if node.ready)
        other = next(node for node in nodes.values() if node is not holder)
        holder.dead.add("m")
        holder.stuck.add("m")
        await gateway.submit(gateway.ask("dies", m))
        await asyncio.sleep(0.5)
        asked = gateway.ask("after", m)
        await gateway.submit(asked)
        await asyncio.sleep(3)
        assert asked.endings == ["done"]
        assert asked.granted_ms - asked.submitted_ms <= 1_500
        assert other.loads == ["m"]

    simulate(story)


def test_a_late_report_of_the_old_instance_leaves_the_new_one_alone() -> None:
    """A request that began before the reload says "broken" after it: the new instance stays."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("first", m))
        await asyncio.sleep(3)
        running = gateway.ask("silent", m, run_ms=5_000)
        await gateway.submit(running)
        await asyncio.sleep(0.1)
        gateway.broken_at_end.add("silent")
        node.dead.add("m")
        await gateway.submit(gateway.ask("dies", m))
        await asyncio.sleep(0.5)
        await gateway.submit(gateway.ask("after", m))
        await asyncio.sleep(8)
        assert node.unloads == ["m"]
        assert gateway.asked[("after", 1)].endings == ["done"]

    simulate(story)


def test_a_victim_that_does_not_leave_costs_seconds_not_the_load_deadline() -> None:
    """The chosen victim never confirms its unload: after 5 s the other idle model goes instead (deadline: 120 s)."""

    async def story(world: World) -> None:
        first, second, wanted = model("a"), model("b"), model("c")
        world.offer(first, second, wanted)
        node, gateway = await world.node(capacity=200), await world.gateway()
        node.stuck.add("a")
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        for each in (first, second):
            await gateway.submit(gateway.ask(each.name, each))
            await asyncio.sleep(2)
        asked = gateway.ask("c", wanted)
        await gateway.submit(asked)
        await asyncio.sleep(20)
        assert asked.endings == ["done"]
        # 5 s of patience, 0.5 s between looks, 3 s until this node is tried again, two ticks, 1 s of load
        assert asked.granted_ms - asked.submitted_ms <= 10_500
        assert node.unloads == ["b"]

    simulate(story)


def test_what_one_replica_was_told_all_know_and_another_goes_on_when_it_dies() -> None:
    """Broken is in the store: no replica grants there. The replica that was told dies; the unload had failed, and is
    ordered by the other one within the 8 s at which a mark counts as left, after which the model runs there again."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        node, gateway = await world.node(), await world.gateway()
        told = await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("first", m))
        await asyncio.sleep(3)
        node.dead.add("m")
        node.deaf = True
        await gateway.submit(gateway.ask("dies", m))
        await asyncio.sleep(1)
        await world.scheduler("s2")
        await asyncio.sleep(1)
        await told.kill()
        asked = gateway.ask("after", m)
        await gateway.submit(asked)
        await asyncio.sleep(3)
        assert not asked.endings, "nobody grants on a dead instance"
        node.deaf = False
        await asyncio.sleep(12)
        assert asked.endings == ["done"]
        assert node.unloads == ["m"]
        assert node.loads == ["m", "m"]

    simulate(story)


class QuickNode(FakeNode):
    """Between two of its states a model leaves and is loaded again for somebody else: nobody hears that it was away."""

    async def unload(self, request: loading_pb2.EnsureUnloadedRequest) -> None:
        self.silent = True
        await super().unload(request)
        self.silent = False
        self.ready[request.version.model] = self.clock.now_ms()


def test_a_dead_instance_that_is_back_before_anybody_saw_it_leave_is_open_again() -> None:
    """It is another one by the time of its state: it gets requests at once, and when it dies too, that is heard."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        node = QuickNode(world.bus, world.clock, world.source)
        world.loaders.nodes[node.node_id] = node
        world.spawn(node.live)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await gateway.submit(gateway.ask("first", m))
        await asyncio.sleep(3)
        for died in ("once", "twice"):
            node.dead.add("m")
            await gateway.submit(gateway.ask(f"dies {died}", m))
            await asyncio.sleep(1.5)
            asked = gateway.ask(f"after {died}", m)
            await gateway.submit(asked)
            await asyncio.sleep(1.5)
            assert asked.endings == ["done"]
        assert node.unloads == ["m", "m"]

    simulate(story)
