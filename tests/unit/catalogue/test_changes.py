"""What differs between two generations is told by kind, name and field."""

import msgspec

from roundhouse.catalogue.changes import Change, changes_between
from roundhouse.catalogue.records import EMPTY, Catalogue, Engine, Interface, Model, Tenant
from roundhouse.vocabulary import Digest, ModelName, TenantId

MODEL = Model(
    name=ModelName("m"),
    source_path="/m",
    engine=Engine.ONNX,
    interface=Interface.TENSORS,
    digest=Digest("sha256:1"),
)
TENANT = Tenant(name=TenantId("t"))


def test_nothing_changed_is_nothing() -> None:
    """The generation's number is not content."""
    one = Catalogue(generation=1, models={MODEL.name: MODEL})
    assert changes_between(one, msgspec.structs.replace(one, generation=2)) == ()


def test_added_changed_and_removed() -> None:
    """A changed thing names its fields."""
    before = Catalogue(models={MODEL.name: MODEL}, tenants={TENANT.name: TENANT})
    newer = msgspec.structs.replace(MODEL, digest=Digest("sha256:2"), slots=9)
    other = Tenant(name=TenantId("u"))
    after = Catalogue(models={MODEL.name: newer}, tenants={other.name: other})
    assert changes_between(before, after) == (
        Change("removed", "tenant", "t"),
        Change("added", "tenant", "u"),
        Change("changed", "model", "m", ("digest", "slots")),
    )
    assert changes_between(EMPTY, EMPTY) == ()
