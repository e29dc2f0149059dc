"""What `roundhouse status` says of requests that wait."""

from rich.console import Console

from roundhouse.cli.cluster_waits import waits_table
from roundhouse.wire.v1.scheduling_pb2 import WaitingModel
from roundhouse.wire.v1.vocabulary_pb2 import ModelVersion


def test_each_model_has_a_line_with_its_reason_the_longest_wait_first() -> None:
    """Seconds with one decimal; a tenant's own replicas are named; nothing where the start is not known."""
    waiting = [
        WaitingModel(
            pool="shared",
            version=ModelVersion(model="m"),
            waiting=3,
            oldest_ms=1_250,
            detail="its load has begun",
            estimated_start_ms=4_200,
        ),
        WaitingModel(pool="p", version=ModelVersion(model="n"), owner="acme", waiting=1, oldest_ms=9_000, detail="no"),
    ]
    console = Console(width=200, record=True)
    console.print(waits_table(waiting))
    header, first, second = (line.split() for line in console.export_text().splitlines())
    assert header[0] == "waiting"
    assert first == ["n", "(acme)", "p", "1", "9.0", "s", "no"]
    assert second == ["m", "shared", "3", "1.2", "s", "4.2", "s", "its", "load", "has", "begun"]
