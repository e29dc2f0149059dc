"""What the commands for nodes and loads make of the admin API's answers."""

from typing import Any

from roundhouse.cli.load_progress import describe, moving_instance
from roundhouse.cli.nodes import standing_on


def instance(model: str, state: str, **more: Any) -> dict[str, Any]:
    """As the admin API tells it."""
    return {"model": model, "state": state, "bytes_done": 0, "bytes_total": 0, "estimated_remaining_ms": 0, **more}


def test_the_bar_shows_the_instance_that_moves() -> None:
    """Of a model that is ready on one node and on its way on another, the latter; half done, 1.5 s left."""
    nodes = [
        {"node_id": "n1", "instances": [instance("m", "ready"), instance("other", "loading")]},
        {
            "node_id": "n2",
            "instances": [instance("m", "staging", bytes_done=5, bytes_total=10, estimated_remaining_ms=1500)],
        },
    ]
    found = moving_instance(nodes, "m")
    assert found is not None
    shown = {"description": "staging on n2", "completed": 5, "total": 10, "left": "about 1.5 s left"}
    assert describe(found) == shown
    assert moving_instance(nodes, "nobody") is None


def test_a_node_is_empty_when_nothing_stands_on_its_device() -> None:
    """Weights on disk are no reason to wait; what unloads is."""
    nodes = [
        {"node_id": "n1", "instances": [instance("a", "staged"), instance("b", "unloading"), instance("c", "failed")]},
        {"node_id": "n2", "instances": [instance("d", "ready")]},
    ]
    assert standing_on(nodes, "n1") == ["b (unloading)"]
    assert standing_on(nodes, "n3") == []
