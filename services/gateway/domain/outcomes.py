"""What a refusal or an ending means to the client: scheduler words turned into the errors of `roundhouse.errors`."""

from roundhouse.errors import (
    CapacityExhausted,
    DeadlinePassed,
    InvalidInput,
    LimitExceeded,
    RoundhouseError,
    Unavailable,
    error_shape,
)
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1.scheduling_pb2 import Refused

STATUS_CLIENT_LEFT = 499  # nginx's number; no client ever sees it, usage events record it
CATALOGUE_LAG_MS = 1_000  # the scheduler polls the catalogue once a second


def refusal_error(refused: Refused) -> RoundhouseError:
    """The error for a request that the scheduler does not take, or gives back."""
    retry_after_ms = refused.retry_after_ms or None
    message = refused.message
    match refused.reason:
        case Refused.REASON_QUEUE_FULL:
            return LimitExceeded(
                message or "Too many of your requests are waiting already.",
                code="queue_full",
                retry_after_ms=retry_after_ms,
            )
        case Refused.REASON_NEVER_FITS:
            return InvalidInput(message or "The model or request can never fit a node.", code="never_fits")
        case Refused.REASON_DEADLINE:
            return DeadlinePassed(message or "The request could not start before its deadline.")
        case Refused.REASON_MODEL_UNKNOWN:
            return VersionUnknown(message or "The model is being registered.", retry_after_ms=CATALOGUE_LAG_MS)
        case _:
            return CapacityExhausted(message or "The model cannot be served now.", retry_after_ms=retry_after_ms)


class VersionUnknown(Unavailable):
    """The scheduler serves no such version: another one took over, or it has not heard of this one yet."""


class ServedByOther(Exception):
    """The scheduler sends the request to the model's fallback: nothing was spent, and it is to be prepared for that."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"served by {model}: {reason}")
        self.model = model


class ClientLeft(Exception):
    """The client is gone, or has not read for so long that it counts as gone."""


def status_of(error: BaseException | None) -> int:
    """The HTTP status that the client saw, or would have seen had the header not been out already."""
    if error is None:
        return 200
    if isinstance(error, RoundhouseError):
        return error_shape(error).http_status
    return STATUS_CLIENT_LEFT if is_departure(error) else 500


def outcome_of(error: BaseException | None) -> Outcome:
    """How an attempt ended, from what ended it."""
    if error is None:
        return Outcome.DONE
    if is_departure(error) or isinstance(error, VersionUnknown):
        return Outcome.CANCELLED
    return Outcome.EXPIRED if isinstance(error, DeadlinePassed) else Outcome.FAILED


def is_departure(error: BaseException) -> bool:
    """Whether it ended without a fault. A cancelled task is the client leaving (or this process ending)."""
    return isinstance(error, ClientLeft | ServedByOther) or not isinstance(error, Exception)
