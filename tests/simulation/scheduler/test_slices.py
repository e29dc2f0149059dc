"""MIG slices of a tenant's own, on one node, with two schedulers that decide at once."""

import asyncio

from roundhouse.catalogue.records import Tenant
from roundhouse.vocabulary import TenantId
from tests.simulation.scheduler.harness import World
from tests.simulation.scheduler.mesh import model
from tests.simulation.scheduler.test_cases import simulate
from tests.simulation.scheduler.test_where import offer, served


def test_a_tenant_with_mig_slices_of_its_own_is_alone_on_them() -> None:
    """Three slices of 200 hold two models of 100 each: the tenant's two models share one slice, others the rest."""

    async def story(world: World) -> None:
        models = [model(f"m{n}") for n in range(2)]
        common = [model(f"c{n}") for n in range(4)]
        offer(world, [Tenant(name=TenantId("apart"), isolation="dedicated-mig")], *models, *common)
        node = await world.node(capacity=600, devices=(200, 200, 200), mig=True)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await served(gateway, gateway.ask("a", models[0], tenant_id="apart"), within_s=3)
        requests = [gateway.ask(each.name, each) for each in common]
        await served(gateway, *requests, gateway.ask("b", models[1], tenant_id="apart"), within_s=8)
        (alone,) = {node.stands[each.name] for each in models}
        assert all(node.stands[each.name] != alone for each in common)
        assert node.unloads == []

    simulate(story)


def test_a_tenant_with_mig_slices_of_its_own_gets_one_that_others_hold() -> None:
    """Two slices of 100 with two models of 50 each, which are asked for all the time: both of one slice leave when they
    have had their time, although the tenant's model of 50 needs the memory of one, and none comes back beside it."""

    async def story(world: World) -> None:
        own, common = model("own", device_bytes=50), [model(f"c{n}", device_bytes=50, slots=4) for n in range(4)]
        offer(world, [Tenant(name=TenantId("apart"), isolation="dedicated-mig")], own, *common)
        node, gateway = await world.node(capacity=200, devices=(100, 100), mig=True), await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        await served(gateway, *(gateway.ask(each.name, each) for each in common), within_s=8)
        asked = gateway.ask("own", own, tenant_id="apart", run_ms=5_000)
        await gateway.submit(asked)
        for n in range(60):
            for each in common:
                await gateway.submit(gateway.ask(f"{each.name} {n}", each, run_ms=500))
            await asyncio.sleep(0.5)
            if "own" in node.ready:
                beside = [each.name for each in common if node.stands.get(each.name) == node.stands["own"]]
                assert not [name for name in beside if name in node.ready or name in node.loading]
        assert asked.granted_ms - asked.submitted_ms <= 25_000  # a quantum of 10 s, two drains, a load

    simulate(story)


def test_a_model_that_others_use_too_takes_turns_between_them_and_a_slice_of_ones_own() -> None:
    """One node, so one instance of `m`: it stands for everybody or alone on a slice, is loaded anew each time, and
    nobody waits longer than the others' quantum (10 s), what runs there (1 s), an unload and a load (1 s)."""

    async def story(world: World) -> None:
        m = model("m", slots=4)
        offer(world, [Tenant(name=TenantId("apart"), isolation="dedicated-mig")], m)
        node, gateway = await world.node(capacity=200, devices=(100, 100), mig=True), await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        requests = [
            gateway.ask(f"{tenant} {n}", m, tenant_id=tenant, run_ms=1_000)
            for n in range(30)
            for tenant in ("t", "apart")
        ]
        for each in requests:
            await gateway.submit(each)
            await asyncio.sleep(0.5)
        await asyncio.sleep(40)
        assert gateway.outcomes() == {"done": 60}
        spans = [(each.granted_ms, each.ended_ms, each.request.tenant_id == "apart") for each in requests]
        for begun, ended, own in spans:
            assert not [1 for other in spans if other[2] != own and other[0] < ended and begun < other[1]]
        assert len(node.loads) >= 3
        assert max(each.granted_ms - each.submitted_ms for each in requests) <= 16_000

    simulate(story)
