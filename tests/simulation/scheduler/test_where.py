"""Where requests run, on virtual time: prefixes, gangs, tenants apart, fallbacks, prefill and decode nodes, reasons."""

import asyncio
import hashlib

from roundhouse import subjects
from roundhouse.catalogue.records import Catalogue, Model, Tenant
from roundhouse.vocabulary import ModelName, NodeId, PoolName, TenantId
from roundhouse.wire.v1 import kv_pb2, vocabulary_pb2
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.scheduler.domain.plans import Wait
from services.scheduler.domain.records import instance_key, version_key
from services.scheduler.domain.speeds import FirstToken
from services.scheduler.ports import BlockList
from tests.simulation.scheduler.fake_gateway import Asked, FakeGateway
from tests.simulation.scheduler.harness import World
from tests.simulation.scheduler.mesh import POOL, model
from tests.simulation.scheduler.test_cases import simulate

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(100)]


def offer(world: World, tenants: list[Tenant], *models: Model) -> None:
    """Put models and tenants into the catalogue."""
    world.source.current = Catalogue(
        generation=2, models={each.name: each for each in models}, tenants={each.name: each for each in tenants}
    )


def node_of(asked: Asked) -> str:
    """Where it decoded."""
    assert asked.grant is not None
    return asked.grant.placements[-1].node_id


async def blocks(world: World, node_id: str, sequence: int, *numbers: int) -> None:
    """A kvstore says what it stored."""
    event = kv_pb2.BlockEvents(
        node_id=node_id, incarnation="a", sequence=sequence, stored=[KEYS[number] for number in numbers]
    )
    await world.bus.publish(subjects.kv_blocks(node_id), event.SerializeToString())


async def served(gateway: FakeGateway, *asked: Asked, within_s: float = 10) -> None:
    """Submit, and wait for the end."""
    for each in asked:
        await gateway.submit(each)
    await asyncio.sleep(within_s)
    assert [each.endings for each in asked] == [["done"]] * len(asked)


def test_a_request_goes_where_its_prefix_is_and_a_lost_announcement_is_made_good() -> None:
    """1,600 tokens: 50 blocks of 16 are on one of two equal instances. Then the other one stores all 100, but the
    message is lost: the next one shows the gap, the list is asked for once, and requests go there."""

    async def story(world: World) -> None:
        m = model("m", slots=8, min_replicas=2)
        world.offer(m)
        for name in ("n1", "n2"):
            await world.node(name)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(4)

        def ask(name: str) -> Asked:
            return gateway.ask(name, m, input_tokens=1_600, block_keys=KEYS)

        for home, other in (("n1", "n2"), ("n2", "n1")):
            await blocks(world, home, 1 if home == "n1" else 3, *range(50 if home == "n1" else 100))
            if home == "n2":
                world.block_lists.lists["n2:kv"] = BlockList("a", 3, tuple(key[:8] for key in KEYS))
                await asyncio.sleep(0.1)
                assert world.block_lists.asked == ["n2:kv"]
            await asyncio.sleep(0.1)
            requests = [ask(f"{home} {number}") for number in range(3)]
            for each in requests:
                await served(gateway, each, within_s=1)
            assert {node_of(each) for each in requests} == {home}, other

    simulate(story)


def test_a_gang_gets_its_devices_and_others_share_the_rest() -> None:
    """Four devices of 100: a model of 200 on two of them, and two of 100 on the others; nothing leaves."""

    async def story(world: World) -> None:
        big = model("big", device_bytes=200, tensor_parallel=2)
        small = [model(f"s{number}") for number in range(2)]
        world.offer(big, *small)
        node, gateway = await world.node(capacity=400, devices=(100, 100, 100, 100)), await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await served(gateway, *(gateway.ask(each.name, each) for each in (small[0], big, small[1])), within_s=5)
        assert node.unloads == []
        assert len(node.stands["big"]) == 2
        assert sorted(index for each in node.stands.values() for index in each) == [0, 1, 2, 3]

    simulate(story)


def test_gangs_and_small_models_that_want_the_same_devices_all_run() -> None:
    """Two gangs of four on four devices, and four models of one, ten requests each of 1 s, two replicas: all run. Under
    rotation no gang waits longer than every other model's quantum (10 s), drain and load once: 5 × 12 s."""

    async def story(world: World) -> None:
        gangs = [model(f"g{n}", device_bytes=400, tensor_parallel=4, slots=4) for n in range(2)]
        small = [model(f"s{n}", slots=4) for n in range(4)]
        world.offer(*gangs, *small)
        node, gateway = await world.node(capacity=400, devices=(100, 100, 100, 100)), await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        requests = [gateway.ask(f"{m.name} {n}", m, run_ms=1_000) for n in range(10) for m in (*small, *gangs)]
        for each in requests:
            await gateway.submit(each)
            await asyncio.sleep(0.3)
        await asyncio.sleep(110)
        assert gateway.outcomes() == {"done": 60}
        assert all(each.granted_ms - each.submitted_ms <= 60_000 for each in requests)
        assert all(len(node.stands[each.name]) == 4 for each in gangs)

    simulate(story)


def test_a_gang_that_no_node_could_hold_is_refused_at_once() -> None:
    """It needs three devices; the node has two."""

    async def story(world: World) -> None:
        big = model("big", device_bytes=150, tensor_parallel=3)
        world.offer(big)
        await world.node(capacity=400, devices=(200, 200))
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        reply = await gateway.submit(gateway.ask("x", big))
        assert reply is not None
        assert reply.refused.reason == wire.Refused.REASON_NEVER_FITS

    simulate(story)


def test_a_tenant_with_its_own_replica_shares_it_with_nobody() -> None:
    """Two nodes, one model: tenant `apart` gets an instance for itself although the shared one has free slots."""

    async def story(world: World) -> None:
        m = model("m", slots=8)
        offer(world, [Tenant(name=TenantId("apart"), isolation="dedicated-replica")], m)
        nodes = {name: await world.node(name) for name in ("n1", "n2")}
        gateway = await world.gateway()
        await world.scheduler("s1")
        await world.scheduler("s2")
        await asyncio.sleep(1.1)
        await served(gateway, gateway.ask("first", m, tenant_id="t1"), within_s=3)
        own = [gateway.ask(f"own {n}", m, tenant_id="apart", run_ms=500) for n in range(5)]
        others = [gateway.ask(f"other {n}", m, tenant_id=f"t{n}", run_ms=500) for n in range(5)]
        await served(gateway, *own, *others, within_s=6)
        assert len({node_of(each) for each in own}) == len({node_of(each) for each in others}) == 1
        assert node_of(own[0]) != node_of(others[0])
        assert [len(node.loads) for node in nodes.values()] == [1, 1]

    simulate(story)


def test_tenants_with_and_without_replicas_of_their_own_take_turns_on_one_node() -> None:
    """One node, so one instance of `m`: idle it changes hands without a load; busy it is closed after 2 s of patience
    and its running requests (0.5 s). Nobody starves, and at no time do both kinds of tenants run on it."""

    async def story(world: World) -> None:
        m = model("m", slots=4)
        offer(world, [Tenant(name=TenantId("apart"), isolation="dedicated-replica")], m)
        node, gateway = await world.node(), await world.gateway()
        await world.scheduler("s1", rotation_seconds=3)
        await world.scheduler("s2", rotation_seconds=3)
        await asyncio.sleep(1.1)
        requests = []
        for number in range(60):
            asked = gateway.ask(f"r{number}", m, tenant_id=("apart", "t1", "t2")[number % 3], run_ms=500)
            requests.append(asked)
            await gateway.submit(asked)
            await asyncio.sleep(0.2)
        await asyncio.sleep(30)
        assert gateway.outcomes() == {"done": 60}
        assert (node.loads, node.unloads) == (["m"], [])
        spans = [(each.granted_ms, each.ended_ms, each.request.tenant_id == "apart") for each in requests]
        for begun, ended, own in spans:
            assert not [1 for other in spans if other[2] != own and other[0] < ended and begun < other[1]]
        assert max(each.granted_ms - each.submitted_ms for each in requests) <= 10_000

    simulate(story)


def test_a_tenant_with_a_pool_of_its_own_has_its_models_there() -> None:
    """The model lives in the shared pool; the tenant's requests name its pool, and the model is loaded there."""

    async def story(world: World) -> None:
        m = model("m")
        offer(world, [Tenant(name=TenantId("apart"), isolation="own")], m)
        node, gateway = await world.node(), await world.gateway()
        node.pool = PoolName("own")
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        asked = gateway.ask("a", m, tenant_id="apart", pool="own")
        await gateway.submit(asked)
        await asyncio.sleep(3)
        assert asked.grant is not None
        assert node.loads == ["m"]

    simulate(story)


def test_a_smaller_model_answers_when_the_promise_would_be_broken() -> None:
    """`big` takes 5 s to load and promises 3 s: a tenant that allows it is sent to `small`, which is ready; one that
    does not waits. Once `big` is ready, nobody is sent away until its slot is taken for longer than it promises."""

    async def story(world: World) -> None:
        small = model("small", slots=8)
        big = model("big", slots=1, cold_start_slo_ms=3_000, ttft_slo_ms=1_000, fallback=ModelName("small"))
        offer(world, [Tenant(name=TenantId("t1"), fallback=True)], small, big)
        for name in ("n1", "n2"):
            await world.node(name, load_ms=5_000)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await served(gateway, gateway.ask("warm", small), gateway.ask("first", big), within_s=8)

        async def submit(name: str, *, allowed: bool) -> wire.SubmitReply:
            reply = await gateway.submit(gateway.ask(name, big, fallback_allowed=allowed, run_ms=4_000))
            assert reply is not None
            return reply

        assert (await submit("free", allowed=True)).accepted.reason == ""
        await asyncio.sleep(0.5)  # what a submit is told is at most a tick old
        busy = await submit("busy", allowed=False)
        assert busy.accepted.reason == "every slot of its instances is in use"
        for number in range(2):
            await submit(f"more {number}", allowed=False)
        await asyncio.sleep(5)  # one has ended: a run takes 4 s on average, and two wait before the next
        sent = await submit("away", allowed=True)
        assert (sent.redirected.model, sent.redirected.model_digest) == ("small", small.digest)
        assert sent.redirected.estimated_wait_ms > 1_000

    simulate(story)


def test_a_cold_model_with_a_fallback_is_not_waited_for() -> None:
    """It would start in 5.3 s by its last start, and 3 s are promised; without leave it is queued and loaded."""

    async def story(world: World) -> None:
        small = model("small", slots=8)
        big = model("big", cold_start_slo_ms=3_000, fallback=ModelName("small"))
        offer(world, [Tenant(name=TenantId("t1"), fallback=True)], small, big)
        node = await world.node(load_ms=5_000)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await served(gateway, gateway.ask("big", big), within_s=8)
        await served(gateway, gateway.ask("small", small), within_s=18)
        assert node.unloads == ["big"]
        sent = await gateway.submit(gateway.ask("away", big, fallback_allowed=True))
        assert sent is not None
        assert sent.redirected.model == "small"
        kept = await gateway.submit(gateway.ask("kept", big))
        assert kept is not None
        assert kept.accepted.estimated_wait_ms >= 5_000
        assert kept.accepted.cold

    simulate(story)


def test_long_prompts_are_handed_over_and_loads_for_prompts_block_no_decode_slot() -> None:
    """Nodes of role prefill and decode: while the prompt's instance loads (10 s), requests run whole on the decode
    node; afterwards a long prompt has both places, a short one stays; both slots are free at the end. Once hand-overs
    are measured to take longer than the prompt, the long one stays too."""

    async def story(world: World) -> None:
        m = model("m", slots=4)
        world.offer(m)
        await world.node("d", role=vocabulary_pb2.NODE_ROLE_DECODE, first_token_ms=3_200)
        slow = await world.node("p", role=vocabulary_pb2.NODE_ROLE_PREFILL, load_ms=10_000)
        gateway = await world.gateway()
        await world.scheduler("s1", disaggregate=True)
        await asyncio.sleep(1.1)
        early = gateway.ask("early", m, input_tokens=3_200)
        await served(gateway, early, within_s=4)
        assert early.grant is not None
        assert len(early.grant.placements) == 1
        assert slow.loading, "the prompt's instance is on its way"
        await asyncio.sleep(10)
        assert slow.ready
        # On d a token took 3,200 ms / 3,200 = 1 ms. What stands on p is taken to be as fast until it was measured: here
        # 20 times faster, so a prompt of 3,200 tokens is at d in 160 ms + 10 ms.
        version = version_key("m", m.digest)
        speeds = world.replicas[0].replica.pools.speeds
        speeds.learn(FirstToken(instance_key(NodeId("p"), version), version, 3_200, 160), world.clock.now_ms())
        long, short = gateway.ask("long", m, input_tokens=3_200), gateway.ask("short", m, input_tokens=10)
        await served(gateway, long, short, within_s=3)
        assert long.grant is not None
        assert [each.node_id for each in long.grant.placements] == ["p", "d"]
        assert short.grant is not None
        assert [each.node_id for each in short.grant.placements] == ["d"]
        for _ in range(20):  # each counts four times what was expected at most
            speeds.learn_handoff(version, 60_000, world.clock.now_ms())
        stays = gateway.ask("stays", m, input_tokens=3_200)
        await served(gateway, stays, within_s=4)
        assert stays.grant is not None
        assert [each.node_id for each in stays.grant.placements] == ["d"]
        assert (await world.store.snapshot(POOL, world.clock.now_ms())).in_use == {}

    simulate(story)


def test_roles_mean_nothing_until_they_are_turned_on() -> None:
    """Without the setting a prefill node serves whole requests as any other."""

    async def story(world: World) -> None:
        m = model("m")
        world.offer(m)
        await world.node("p", role=vocabulary_pb2.NODE_ROLE_PREFILL)
        gateway = await world.gateway()
        await world.scheduler("s1")
        await asyncio.sleep(1.1)
        await served(gateway, gateway.ask("a", m), within_s=3)

    simulate(story)


def test_why_something_waits_is_told() -> None:
    """`hot` holds the memory in its quantum: `cold` waits its turn, in the answer to the submit, the metric, the audit
    stream (after 5 s) and to whoever asks; each class of reasons is there once, at zero if nobody waits for it."""

    async def story(world: World) -> None:
        hot, cold = model("hot", slots=1), model("cold")
        world.offer(hot, cold)
        await world.node()
        gateway = await world.gateway()
        await world.scheduler("s1", rotation_seconds=30)
        await asyncio.sleep(1.1)
        for number in range(20):
            await gateway.submit(gateway.ask(f"h{number}", hot, run_ms=2_000))
        await asyncio.sleep(5)
        reply = await gateway.submit(gateway.ask("c", cold))
        assert reply is not None
        assert reply.accepted.reason == "no memory is free; the models that hold it have their time first"
        assert reply.accepted.estimated_first_token_ms >= 20_000
        await asyncio.sleep(8)
        waits = world.instruments.waits[POOL]
        assert waits.keys() == set(Wait)
        assert waits[Wait.TURN] == 1
        assert waits[Wait.SLOTS] > 0
        told = [each for each in world.audit.events if each.what == "wait"]
        assert [(each.subject, each.details["why"]) for each in told] == [("cold", "not_its_turn")]
        data = await world.bus.request(subjects.WORK_EXPLAIN, wire.ExplainRequest(model="cold").SerializeToString())
        (said,) = wire.ExplainReply.FromString(data).waiting
        assert (said.version.model, said.waiting, said.reason) == ("cold", 1, "not_its_turn")
        assert said.oldest_ms >= 8_000
        assert said.estimated_start_ms > 0

    simulate(story)
