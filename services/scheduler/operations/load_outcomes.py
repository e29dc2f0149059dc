"""How a load ended, in the words of metrics and of retries."""

from roundhouse.errors import CapacityExhausted, Conflict, RoundhouseError
from services.scheduler.domain.nodes import Residence
from services.scheduler.domain.placement import Load, PoolView


def said_retry_ms(view: PoolView, load: Load) -> int:
    """When the loader itself will try again; 0 = it says nothing."""
    node = next((each for each in view.nodes if each.node_id == load.node_id), None)
    found = node.find(load.version) if node else None
    return found.retry_at_ms if found is not None and found.residence is Residence.FAILED else 0


def outcome(failure: RoundhouseError | None) -> str:
    """A closed list: it is a metric's label."""
    match failure:
        case None:
            return "ready"
        case CapacityExhausted() | Conflict():
            return "no_room"
        case _:
            return "failed"
