"""Which version requests use while a new one takes over (case B19)."""

from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model, Price
from roundhouse.vocabulary import Digest, ModelName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.gateway.adapters.serving_versions import HOLD_MS, SILENT_MS, ServingVersions
from tests.fakes.catalogue import FixedCatalogue
from tests.fakes.clock import ManualClock

NAME = ModelName("m")
V1, V2, V3 = (Digest(f"sha256:{digit}") for digit in "123")
READY, FAILED = vocabulary_pb2.INSTANCE_STATE_READY, vocabulary_pb2.INSTANCE_STATE_FAILED


def catalogue(digest: Digest, generation: int, price: str = "1") -> Catalogue:
    """One model in this version."""
    model = Model(
        name=NAME,
        source_path="/m",
        engine=Engine.REFERENCE,
        interface=Interface.LLM,
        digest=digest,
        price=Price(id="p", input=price),
    )
    return Catalogue(generation=generation, models={NAME: model})


class World:
    """A gateway's view of the catalogue, and one node."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.declared = FixedCatalogue(catalogue(V1, 1))
        self.serving = ServingVersions(self.declared, self.clock)
        self.heard: list[Digest] = []
        self.serving.subscribe(lambda current: self.heard.append(current.models[NAME].digest))

    def say(
        self, node: str = "n1", *, accepting: bool = True, **states: "vocabulary_pb2.InstanceState.ValueType"
    ) -> None:
        """The node tells the states of versions: `v1=READY`."""
        versions = {"v1": V1, "v2": V2, "v3": V3}
        instances = [
            loading_pb2.Instance(version=vocabulary_pb2.ModelVersion(model=NAME, digest=versions[key]), state=state)
            for key, state in states.items()
        ]
        self.serving.observe(loading_pb2.NodeState(node_id=node, accepting=accepting, instances=instances))

    @property
    def used(self) -> Digest:
        """The version that requests use."""
        return self.serving.current.models[NAME].digest


def test_the_old_version_is_used_until_the_new_one_is_ready() -> None:
    """And its listeners hear of both changes; price and access are the new ones at once."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2, price="3"))
    assert world.used == V1
    record = world.serving.current.models[NAME]
    assert record.price is not None
    assert record.price.input == "3"
    world.say(v1=READY)
    assert world.used == V1
    world.say(v1=READY, v2=READY)
    assert world.used == V2
    assert world.heard == [V1, V1, V2]
    assert world.serving.current is world.declared.current


def test_a_cold_model_changes_at_once() -> None:
    """Nobody has the old one ready, or its node is not in service: requests wait for the new one."""
    world = World()
    world.declared.replace(catalogue(V2, 2))
    assert world.used == V2
    other = World()
    other.say(v1=READY, accepting=False)
    other.declared.replace(catalogue(V2, 2))
    assert other.used == V2


def test_an_old_version_that_leaves_is_let_go() -> None:
    """There was no room for both: the gap is spent waiting for the new one, not failing on the old one."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2))
    world.say()
    assert world.used == V2
    world.say(v1=READY, v2=FAILED)
    assert world.used == V1, "it came back, because the new one could not be loaded"


def test_an_old_version_that_is_about_to_leave_is_let_go_before() -> None:
    """It says so while it is ready: what was sent to it until then finds it."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2))
    version = vocabulary_pb2.ModelVersion(model=NAME, digest=V1)
    leaving = loading_pb2.Instance(version=version, state=READY, reason="leaves for its new version")
    world.serving.observe(loading_pb2.NodeState(node_id="n1", accepting=True, instances=[leaving]))
    assert world.used == V2


def test_a_silent_node_has_nothing_ready() -> None:
    """Ten seconds without a word."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2))
    world.clock.advance(SILENT_MS + 1)
    world.say("n2")
    assert world.used == V2


def test_a_broken_version_leaves_the_old_one_serving() -> None:
    """For as long as it takes; the next version takes over when it is ready."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2))
    for _ in range(2 * HOLD_MS // SILENT_MS):
        world.clock.advance(SILENT_MS)
        world.say(v1=READY, v2=FAILED)
    assert world.used == V1
    world.declared.replace(catalogue(V3, 3))
    assert world.used == V1
    world.say(v1=READY, v3=READY)
    assert world.used == V3


def test_a_version_that_nobody_loads_is_asked_for_in_the_end() -> None:
    """After five minutes requests go to it, and wait."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2))
    world.clock.advance(HOLD_MS)
    world.say(v1=READY)
    assert world.used == V2


def test_going_back_is_no_change_of_what_is_used() -> None:
    """Applied, and taken back before it was ready; and a model that is removed meanwhile is gone at once."""
    world = World()
    world.say(v1=READY)
    world.declared.replace(catalogue(V2, 2))
    world.declared.replace(catalogue(V1, 3))
    assert world.serving.current is world.declared.current
    world.declared.replace(catalogue(V2, 4))
    plain = ServingVersions(FixedCatalogue(Catalogue(generation=1)), world.clock)
    assert plain.current.models == {}
