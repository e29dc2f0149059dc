"""Where a request was granted, kept with its ticket so that any replica can deliver the same grant again.

Also says where the wait went: a request that was queued before its instance was ready waited for staging and loading,
as far as its own wait reaches; the rest is queueing.
"""

from dataclasses import dataclass

import msgspec

from roundhouse.wire.v1 import scheduling_pb2
from services.scheduler.domain.nodes import InstanceView
from services.scheduler.domain.records import Ticket


class _Place(msgspec.Struct, frozen=True, array_like=True):
    placement: bytes
    ready_since_ms: int
    stage_ms: int
    load_ms: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Place)


@dataclass(frozen=True, slots=True)
class Waits:
    """Where the time between submit and grant went."""

    queue_ms: int
    stage_ms: int
    load_ms: int


def encode(placement: scheduling_pb2.Placement, instance: InstanceView) -> bytes:
    """The opaque `place` of an offer."""
    return _encoder.encode(
        _Place(placement.SerializeToString(), instance.since_ms, instance.stage_ms, instance.load_ms)
    )


def placement(ticket: Ticket) -> scheduling_pb2.Placement:
    """Where a granted ticket runs."""
    return scheduling_pb2.Placement.FromString(_decoder.decode(ticket.place).placement)


def placements(ticket: Ticket) -> list[scheduling_pb2.Placement]:
    """Where a granted ticket runs: one place, or the prompt's and then the one that decodes."""
    prefill = [_decoder.decode(ticket.prefill_place).placement] if ticket.prefill_place else []
    return [scheduling_pb2.Placement.FromString(each) for each in (*prefill, _decoder.decode(ticket.place).placement)]


def waits(ticket: Ticket) -> Waits:
    """Where a granted ticket's wait went; the three add up to submit to grant."""
    place = _decoder.decode(ticket.place)
    total_ms = max(0, ticket.granted_ms - ticket.enqueued_ms)
    if ticket.enqueued_ms >= place.ready_since_ms:
        return Waits(total_ms, 0, 0)
    load_ms = min(place.load_ms, total_ms)
    stage_ms = min(place.stage_ms, total_ms - load_ms)
    return Waits(total_ms - load_ms - stage_ms, stage_ms, load_ms)
