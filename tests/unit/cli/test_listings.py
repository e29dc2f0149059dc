"""What `models list` and `adapters list` say of pins and refusals."""

from typing import Any

import pytest

from roundhouse.cli.adapters import _reasons
from roundhouse.cli.models import _rows


@pytest.mark.parametrize(
    ("declared", "pins", "shown"),
    [
        ((False, 0), {}, ""),
        ((True, 0), {}, "1 (declared)"),
        ((False, 3), {}, "3 (declared)"),
        ((False, 0), {"m": {"min_replicas": 2}}, "2 (by hand)"),
        ((True, 3), {"m": {"min_replicas": 2}}, "3 (by hand)"),
        ((False, 0), {"other": {"min_replicas": 2}}, ""),
    ],
)
def test_who_keeps_a_model_and_how_many(declared: tuple[bool, int], pins: dict[str, Any], shown: str) -> None:
    """The larger of what is declared and what an operator said, and whether somebody did."""
    model = {"name": "m", "engine": "onnx", "pool": "shared", "device_bytes": 1, "digest": "sha256:0"}
    model |= {"pinned": declared[0], "min_replicas": declared[1]}
    (row,) = _rows(model, pins, [])
    assert row["pinned"] == shown


def test_every_node_that_refused_an_adapter_is_named() -> None:
    """With the reason of each."""
    nodes = [
        {"node_id": "n1", "adapters": {"refused": [{"adapter": "a", "base": "m", "reason": "r must be"}]}},
        {"node_id": "n2", "adapters": {"refused": [{"adapter": "a", "base": "m", "reason": "too large"}]}},
        {"node_id": "n3", "adapters": {"refused": []}},
    ]
    assert _reasons(nodes) == {"a": "n1: r must be; n2: too large"}
