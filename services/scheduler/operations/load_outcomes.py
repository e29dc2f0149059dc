"""How a load ended, in the words of metrics and of retries."""

from roundhouse.errors import CapacityExhausted, Conflict, InvalidInput, RoundhouseError
from services.scheduler.domain.nodes import Residence
from services.scheduler.domain.placement import Load, PoolView
from services.scheduler.domain.records import LoadFailure

LOAD_TRIES = 3  # as ModelMesh; then the waiting requests are told
NO_ROOM_RETRY_MS = 500  # the node's memory was not what its last state said; the next state comes within a second
FIRST_RETRY_MS = 1_000
LONGEST_RETRY_MS = 60_000
RETRY_MARGIN_MS = 100  # after the loader's own pause, so that a try does not meet its end
UNCONFIRMED_RETRY_MS = 3_000  # a guess: long enough for another node to be chosen, short if there is none


class VictimsStay(CapacityExhausted):
    """The load was given up by its follower, because an unload before it is not confirmed."""


def failure_note(view: PoolView, load: Load, error: RoundhouseError, now_ms: int) -> LoadFailure:
    """When the next try is due after this one, and how many there were; lack of room is no failure of the version."""
    before = view.state.failures.get((load.version, load.node_id))
    tries = before.tries if before else 0
    match error:
        case VictimsStay():
            return LoadFailure(now_ms + UNCONFIRMED_RETRY_MS, tries, error.message)
        case CapacityExhausted() | Conflict():
            return LoadFailure(now_ms + NO_ROOM_RETRY_MS, tries, error.message)
        case InvalidInput():  # FAILED_PRECONDITION: it can never fit that node
            return LoadFailure(now_ms + LONGEST_RETRY_MS, LOAD_TRIES, error.message)
        case _:
            tries += 1
            pause_ms = min(LONGEST_RETRY_MS, FIRST_RETRY_MS << min(tries - 1, 16))
            said_ms = said_retry_ms(view, load)
            return LoadFailure(max(now_ms + pause_ms, said_ms + RETRY_MARGIN_MS), tries, error.message)


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
