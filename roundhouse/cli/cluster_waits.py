"""What waits in the queues and why, for `roundhouse status`: one scheduler is asked, and answers from its last plan."""

from collections.abc import Sequence

from google.protobuf.message import DecodeError
from rich.table import Table
from rich.text import Text

from roundhouse import subjects
from roundhouse.errors import RoundhouseError
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import scheduling_pb2

ANSWER_MS = 1_000  # it answers from memory; a scheduler that is away has its own line


async def waiting_models(nats_url: str) -> list[scheduling_pb2.WaitingModel]:
    """Models with requests that wait; none if no scheduler answers."""
    try:
        bus = await NatsBus.connect(nats_url, name="roundhouse-status")
    except RoundhouseError:
        return []
    try:
        request = scheduling_pb2.ExplainRequest()
        data = await bus.request(subjects.WORK_EXPLAIN, request.SerializeToString(), timeout_ms=ANSWER_MS)
        return list(scheduling_pb2.ExplainReply.FromString(data).waiting)
    except (RoundhouseError, DecodeError):
        return []
    finally:
        await bus.close()


def waits_table(waiting: Sequence[scheduling_pb2.WaitingModel]) -> Table:
    """One line a model, the longest wait first."""
    table = Table("waiting for", "pool", "requests", "longest", "expected start", "because", box=None, pad_edge=False)
    for each in sorted(waiting, key=lambda each: -each.oldest_ms):
        name = f"{each.version.model} ({each.owner})" if each.owner else each.version.model
        start = f"{each.estimated_start_ms / 1000:.1f} s" if each.estimated_start_ms else ""
        because = Text(each.detail or "a slot is about to be free")
        table.add_row(name, each.pool, str(each.waiting), f"{each.oldest_ms / 1000:.1f} s", start, because)
    return table
