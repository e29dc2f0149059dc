"""The admin API over fakes: who may call what, and what it answers."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from roundhouse import subjects
from roundhouse.block_keys import tenant_salt
from roundhouse.vocabulary import KeyId
from roundhouse.wire.v1 import kv_pb2, loading_pb2
from services.gateway.adapters.admin_nodes import ALIVE_MS
from services.gateway.domain.idempotency import Claimed, Differs
from services.gateway.domain.keys import INFERENCE, USAGE_READ, key_hash
from tests.unit.catalogue.files import GOOD, write_models
from tests.unit.gateway.admin_world import ACME, GLOBEX, World

EVERYTHING = [
    ("POST", "/catalogue"),
    ("GET", "/catalogue"),
    ("POST", "/keys"),
    ("GET", "/keys"),
    ("DELETE", "/keys/key-1"),
    ("POST", "/keys/key-1/rotate"),
    ("POST", "/tenants/acme/erase-stored"),
    ("GET", "/nodes"),
    ("POST", "/models/chat/load"),
    ("POST", "/models/chat/unload"),
    ("POST", "/models/chat/stage"),
    ("POST", "/nodes/n1/drain"),
    ("POST", "/nodes/n1/resume"),
]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Two tenants, one model, no nodes, the bootstrap key."""
    made = World()
    yield made
    await made.client.aclose()


@pytest.mark.parametrize(("method", "path"), [*EVERYTHING, ("GET", "/usage"), ("GET", "/nothing")])
async def test_nothing_answers_without_a_good_key(world: World, method: str, path: str) -> None:
    """B05: no key, a wrong key, a revoked one: 401 on every route, and nothing is done."""
    gone = await world.key_of(ACME, INFERENCE)
    await world.directory.revoke(KeyId((await world.keys.all("acme"))[0].key_id), 1)
    for headers in ({}, {"authorization": "Bearer rh-" + "x" * 43}, {"authorization": f"Bearer {gone}"}):
        answer = await world.client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert world.loader.commands == []


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
async def test_a_tenants_key_administers_nothing(world: World, method: str, path: str) -> None:
    """B05: K1 on load, unload and admin is 403."""
    answer = await world.call(method, path, key=await world.key_of(ACME, INFERENCE, USAGE_READ))
    assert answer.status_code == 403
    assert world.loader.commands == []


@pytest.mark.parametrize("path", ["/keys/", "//keys", "/KEYS", "/keys%2f", "/../v1/keys", "/keys/../keys"])
async def test_other_spellings_open_no_door(world: World, path: str) -> None:
    """B05: without a key every spelling is 401; with a tenant's key none is answered."""
    assert (await world.client.get(path)).status_code == 401
    assert (await world.call("GET", path, key=await world.key_of(ACME, INFERENCE))).status_code >= 400


async def test_a_declaration_is_applied_over_http(world: World, tmp_path: Path) -> None:
    """B44: the answer has the generation and the changes; a wrong one is 400 with every place."""
    body = {"text": GOOD, "file_name": "c.yaml", "base_dir": str(write_models(tmp_path))}
    answer = await world.call("POST", "/catalogue", json=body)
    assert answer.status_code == 200
    assert (answer.json()["generation"], len(answer.json()["changes"])) == (1, 5)
    wrong = {**body, "text": GOOD.replace("weight: 2", "wieght: 2").replace("base: chat", "base: x")}
    answer = await world.call("POST", "/catalogue", json=wrong)
    assert answer.status_code == 400
    assert answer.json()["problems"][0] == {
        "file": "c.yaml",
        "line": 4,
        "column": 5,
        "reason": "unknown key `wieght`, did you mean `weight`?",
    }
    assert len(answer.json()["problems"]) == 2
    assert answer.json()["error"]["code"] == "declaration_refused"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"text": 5}', b'{"text": "", "other": 1}', b"\xff", b'{"text": "", "base_dir": "rel"}'],
)
async def test_a_body_that_is_wrong_is_400(world: World, content: bytes) -> None:
    """Whatever is sent, the answer is about the caller's input and not a fault of ours."""
    answer = await world.call("POST", "/catalogue", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_the_catalogue_is_shown_whole_or_by_kind_and_name(world: World) -> None:
    """Kinds as maps in the whole, as lists alone."""
    whole = (await world.call("GET", "/catalogue")).json()
    assert (whole["generation"], sorted(whole["tenants"]), list(whole["models"])) == (3, ["acme", "globex"], ["chat"])
    models = (await world.call("GET", "/catalogue?kind=models&name=chat")).json()["models"]
    assert [model["name"] for model in models] == ["chat"]
    missing = await world.call("GET", "/catalogue?kind=tenants&name=none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "tenant_not_found")
    assert (await world.call("GET", "/catalogue?kind=secrets")).status_code == 400


async def test_a_key_is_shown_once(world: World) -> None:
    """Invariant 16: made, listed without its text, revoked, and revoked again."""
    made = await world.call("POST", "/keys", json={"tenant": "acme", "label": "ci", "expires_in_s": 60})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    text, key_id = made.json()["key"], made.json()["key_id"]
    listed = await world.call("GET", "/keys?tenant=acme")
    assert [(key["key_id"], key["state"], key["label"]) for key in listed.json()["keys"]] == [(key_id, "active", "ci")]
    assert text not in listed.text
    assert key_hash(text) not in listed.text
    for _ in range(2):
        assert (await world.call("DELETE", f"/keys/{key_id}")).json()["state"] == "revoked"
    assert (await world.call("DELETE", "/keys/key-none")).status_code == 404


async def test_a_key_is_rotated_over_http(world: World) -> None:
    """The successor is shown once; the old key is listed with its end; limits are those of the key."""
    wish = {"tenant": "acme", "limits": {"requests_per_minute": 7, "budget": {"amount": "2.50"}}}
    old = (await world.call("POST", "/keys", json=wish)).json()
    assert old["limits"] == {
        "requests_per_minute": 7,
        "tokens_per_minute": None,
        "concurrent_requests": None,
        "queued_requests": None,
        "queued_tokens": None,
        "budget": {"amount": "2.50", "currency": "USD", "period": "month"},
    }
    answer = await world.call("POST", f"/keys/{old['key_id']}/rotate", json={"overlap_s": 60})
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    made = answer.json()
    assert (made["replaces"], made["limits"], made["old"]["key_id"]) == (old["key_id"], old["limits"], old["key_id"])
    assert made["old"]["expires"] is not None
    assert made["key"] != old["key"]
    assert (await world.call("POST", "/keys/key-none/rotate")).status_code == 404
    assert (await world.call("POST", "/keys", json={"tenant": "acme", "limits": {"x": 1}})).status_code == 400


async def test_a_revoked_admin_key_opens_nothing(world: World) -> None:
    """B06: an admin key ends at once, also for the admin API itself."""
    made = (await world.call("POST", "/keys", json={"scopes": ["admin"]})).json()
    assert (await world.call("GET", "/nodes", key=made["key"])).status_code == 200
    await world.call("DELETE", f"/keys/{made['key_id']}")
    assert (await world.call("GET", "/nodes", key=made["key"])).status_code == 401


async def test_usage_is_anyones_for_operators_and_ones_own_for_tenants(world: World) -> None:
    """Invariant 16: a tenant's key reads its own tenant, whatever it asks for."""
    key = await world.key_of(ACME, USAGE_READ)
    asked = (await world.call("GET", "/usage?tenant=globex&group_by=model")).json()["asked"]
    assert asked == {"tenant": "globex", "group_by": "model"}
    assert (await world.call("GET", "/usage?group_by=day", key=key)).json()["asked"]["tenant"] == "acme"
    assert (await world.call("GET", "/usage?tenant=acme", key=key)).status_code == 200
    assert (await world.call("GET", "/usage?tenant=globex", key=key)).status_code == 403
    twice = await world.call("GET", "/usage?tenant=acme&tenant=globex", key=key)
    assert twice.status_code == 403
    swapped = await world.call("GET", "/usage?tenant=globex&tenant=acme", key=key)
    assert swapped.json()["asked"]["tenant"] == "acme"


async def test_nodes_are_those_that_spoke_lately(world: World) -> None:
    """Ten silent seconds and a node is gone; states are words."""
    await world.say("b")
    world.clock.advance(ALIVE_MS)
    await world.say("a", state="LOADING")
    both = (await world.call("GET", "/nodes")).json()["nodes"]
    assert [(node["node_id"], node["instances"][0]["state"]) for node in both] == [("a", "loading"), ("b", "ready")]
    world.clock.advance(1)
    assert [node["node_id"] for node in (await world.call("GET", "/nodes")).json()["nodes"]] == ["a"]


async def test_a_model_is_loaded_where_there_is_room(world: World) -> None:
    """The node of its pool with the most free memory, unless one is named or has it already."""
    assert (await world.call("POST", "/models/chat/load")).status_code == 503
    await world.say("small", state="", free=10)
    await world.say("large", state="", free=20)
    await world.say("foreign", state="", free=99, pool="other")
    answer = await world.call("POST", "/models/chat/load")
    assert answer.json()["nodes"] == [{"node": "large", "loaded": True}]
    assert (await world.call("POST", "/models/chat/load", json={"node": "small"})).json()["nodes"][0]["node"] == "small"
    assert world.loader.commands == [("load", "large:1", "sha256:aa"), ("load", "small:1", "sha256:aa")]
    await world.say("small", state="READY", free=10)
    assert (await world.call("POST", "/models/chat/load")).json()["nodes"] == [{"node": "small", "loaded": False}]
    assert (await world.call("POST", "/models/none/load")).status_code == 404
    assert (await world.call("POST", "/models/chat/load", json={"node": "none"})).status_code == 404
    world.loader.refuses = True
    assert (await world.call("POST", "/models/chat/load", json={"node": "large"})).status_code == 503


async def test_weights_are_staged_and_nodes_are_drained_by_hand(world: World) -> None:
    """A tier below the device, checked; a node by name, with the reason; both are told to the loader of that node."""
    await world.say("a", state="", free=10)
    answer = await world.call("POST", "/models/chat/stage", json={"tier": "disk"})
    assert answer.json()["nodes"] == [{"node": "a", "staged": True}]
    assert world.loader.commands == [("stage", "a:1", "sha256:aa")]
    assert (await world.call("POST", "/models/chat/stage", json={"tier": "device"})).status_code == 400
    assert (await world.call("POST", "/nodes/a/drain", json={"reason": "disk"})).json() == {
        "node": "a",
        "draining": True,
    }
    assert (await world.call("POST", "/nodes/a/resume")).json() == {"node": "a", "draining": False}
    assert world.maintenance.commands == [("drain", "a:1", "disk"), ("resume", "a:1")]
    assert (await world.call("POST", "/nodes/none/drain")).status_code == 404


async def test_a_model_is_unloaded_from_every_node_that_has_it(world: World) -> None:
    """One node if it is named."""
    await world.say("a")
    await world.say("b", state="")
    await world.say("c")
    answer = await world.call("POST", "/models/chat/unload")
    assert [place["node"] for place in answer.json()["nodes"]] == ["a", "c"]
    assert (await world.call("POST", "/models/chat/unload", json={"node": "c"})).json()["nodes"][0]["node"] == "c"


async def test_an_older_state_of_a_node_changes_nothing(world: World) -> None:
    """States may overtake each other on the way."""
    newer = loading_pb2.NodeState(node_id="a", incarnation="1", sequence=5, accepting=True)
    older = loading_pb2.NodeState(node_id="a", incarnation="1", sequence=4)
    restarted = loading_pb2.NodeState(node_id="a", incarnation="2", sequence=1)
    seen = []
    for state in (newer, older, restarted):
        world.nodes.observe(state)
        seen.append((await world.nodes.all())[0].incarnation + str((await world.nodes.all())[0].sequence))
    assert seen == ["15", "15", "21"]


async def test_a_tenants_cache_is_erased_on_every_node(world: World) -> None:
    """Both kvstores are asked with the salt that requests of the tenant have, and nothing is left."""
    await world.say("n1")
    await world.say("n2")
    answer = (await world.call("POST", f"/tenants/{ACME}/erase-cache")).json()
    assert answer["erased"]
    assert [(node["node"], node["blocks"], node["blocks_left"]) for node in answer["nodes"]] == [
        ("n1", 3, 0),
        ("n2", 3, 0),
    ]
    assert world.caches.asked == [("n1:2", tenant_salt("cluster", ACME)), ("n2:2", tenant_salt("cluster", ACME))]


async def test_an_erasure_is_also_an_order_for_nodes_that_are_away(world: World) -> None:
    """It is in the stream before any node is asked, with the hash of the salt and not the salt; without the stream
    nobody is asked, since a node that is away would keep the blocks for good."""
    await world.say("n1")
    await world.call("POST", f"/tenants/{ACME}/erase-cache")
    durable = world.bus.durable.values()
    [order] = [kv_pb2.ErasureOrder.FromString(data) for subject, data in durable if subject == subjects.ERASURES]
    assert (order.tenant_id, order.salt_hash) == (ACME, sha256(tenant_salt("cluster", ACME)).digest())
    world.caches.asked.clear()
    world.bus.connected = False
    assert (await world.call("POST", f"/tenants/{ACME}/erase-cache")).status_code == 503
    assert world.caches.asked == []


async def test_a_cache_that_could_not_be_erased_is_named(world: World) -> None:
    """One of two nodes is away: the other is erased, and the answer says that the whole is not."""
    await world.say("n1")
    await world.say("n2")
    world.caches.away = "n2:2"
    answer = (await world.call("POST", f"/tenants/{ACME}/erase-cache")).json()
    assert not answer["erased"]
    assert [bool(node["error"]) for node in answer["nodes"]] == [False, True]


async def test_what_is_stored_of_a_tenant_is_erased(world: World) -> None:
    """Answers kept for repeated requests: the tenant's, and no other's."""
    for tenant in (ACME, GLOBEX):
        await world.answers.claim(tenant, "k", "f", "a")
    answer = await world.call("POST", f"/tenants/{ACME}/erase-stored")
    assert answer.json() == {"answers": 1, "files_and_batches": 0}
    assert isinstance(await world.answers.claim(ACME, "k", "other", "b"), Claimed)
    assert isinstance(await world.answers.claim(GLOBEX, "k", "other", "b"), Differs)


async def test_only_operators_erase(world: World) -> None:
    """A tenant's own key is not enough."""
    answer = await world.call("POST", f"/tenants/{ACME}/erase-cache", await world.key_of(ACME, INFERENCE))
    assert answer.status_code == 403
