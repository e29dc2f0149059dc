"""Messages to gateways and to metering, made from tickets alone, so any replica can make the same one again."""

from google.protobuf.message import DecodeError

from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1 import scheduling_pb2 as wire
from roundhouse.wire.v1 import usage_pb2
from services.scheduler.domain.records import AttemptId, RefusalReason, Standing, Ticket, Tokens, VersionKey
from services.scheduler.operations import places

EMITTER = "scheduler"
USAGE_TYPE = "roundhouse.usage.v1"
ABANDONED_STATUS = 502  # what the client of a vanished gateway saw, if anything

_REASONS = {
    RefusalReason.DEADLINE: wire.Refused.REASON_DEADLINE,
    RefusalReason.UNAVAILABLE: wire.Refused.REASON_UNAVAILABLE,
    RefusalReason.NEVER_FITS: wire.Refused.REASON_NEVER_FITS,
    RefusalReason.REPLACED: wire.Refused.REASON_MODEL_UNKNOWN,
}
_TEXTS = {RefusalReason.DEADLINE: "its deadline passed in the queue"}


def request_of(ticket: Ticket) -> wire.SubmitRequest:
    """The request as submitted. Raises ValueError if the payload is none of ours."""
    try:
        return wire.SubmitRequest.FromString(ticket.payload)
    except DecodeError as error:
        raise ValueError(f"the payload of {ticket.attempt} cannot be read") from error


def delivery(ticket: Ticket) -> wire.GrantDelivery:
    """The grant or the rejection of a ticket."""
    request = request_of(ticket)
    if ticket.standing is Standing.GRANTED:
        return wire.GrantDelivery(grant=_grant(ticket, request))
    reason = RefusalReason(ticket.reason)
    refused = wire.Refused(reason=_REASONS[reason], message=ticket.message or _TEXTS.get(reason, ""))
    return wire.GrantDelivery(
        rejection=wire.Rejection(request_id=request.request_id, attempt=request.attempt, refused=refused)
    )


def _grant(ticket: Ticket, request: wire.SubmitRequest) -> wire.Grant:
    waits = places.waits(ticket)
    return wire.Grant(
        request_id=request.request_id,
        attempt=request.attempt,
        lease_id=lease_id(ticket.attempt, ticket.version),
        lease_expires_unix_ms=ticket.lease_expires_ms,
        placements=places.placements(ticket),
        queue_ms=waits.queue_ms,
        stage_ms=waits.stage_ms,
        load_ms=waits.load_ms,
    )


def lease_id(attempt: AttemptId, version: VersionKey) -> str:
    """The name of a lease. Gateways say it back at the end, so any replica knows whose slot is free."""
    return f"{attempt}:{version}"


def version_of_lease(text: str, attempt: AttemptId) -> VersionKey | None:
    """The version inside a lease's name; None if it is none of ours."""
    version = text.removeprefix(f"{attempt}:")
    return VersionKey(version) if version and version != text else None


def usage_event(ticket: Ticket, cluster: str) -> usage_pb2.UsageEvent:
    """The usage of a lapsed attempt, as of its gateway's last heartbeat: the same bytes whichever replica makes it.

    Nobody got anything of an attempt without a token, so that one costs nothing."""
    request, waits = request_of(ticket), places.waits(ticket)
    used = ticket.used if ticket.used.output else Tokens()
    data = usage_pb2.UsageData(
        request_id=request.request_id,
        attempt=request.attempt,
        key_id=request.key_id,
        model=request.model,
        model_digest=request.model_digest,
        adapter=request.adapter,
        adapter_digest=request.adapter_digest,
        priority_class=request.priority_class,
        outcome=Outcome.ABANDONED.to_wire(),
        status=ABANDONED_STATUS,
        input_tokens=used.input,
        cached_tokens=used.cached,
        output_tokens=used.output,
        counted_by=usage_pb2.TOKEN_SOURCE_HEARTBEAT,
        queue_ms=waits.queue_ms,
        stage_ms=waits.stage_ms,
        load_ms=waits.load_ms,
        total_ms=max(0, ticket.ended_ms - ticket.enqueued_ms),
        run_ms=max(0, ticket.lease_expires_ms - ticket.granted_ms),
        node_id=places.placement(ticket).node_id,
        emitter=EMITTER,
    )
    return usage_pb2.UsageEvent(
        id=ticket.attempt,
        source=cluster,
        type=USAGE_TYPE,
        subject=request.tenant_id,
        time_unix_ms=ticket.ended_ms,
        data=data,
    )
