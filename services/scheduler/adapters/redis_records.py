"""How the scripts' replies become the domain's records, in one place. Layouts are those of `scripts/*.lua`."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import msgspec

from roundhouse.vocabulary import NodeId, Outcome, TenantId
from services.scheduler.domain.records import (
    CLASSES,
    AttemptId,
    DrainMark,
    DrainStage,
    Enqueued,
    InstanceKey,
    Known,
    LaneDepth,
    LoadClaim,
    LoadFailure,
    NotHeld,
    PoolState,
    Queued,
    QueueEntry,
    QueueFull,
    Settled,
    Shed,
    Standing,
    Taken,
    Ticket,
    Tokens,
    TooLate,
    Turn,
    TurnDone,
    VersionKey,
)
from services.scheduler.domain.service import Policy

Argument = str | bytes | int | float


def policy_argument(policy: Policy) -> bytes:
    """The policy as the scripts read it: its numbers in the order of its fields, packed one after the other."""
    return b"".join(msgspec.msgpack.encode(int(value)) for value in astuple(policy))


def warm_argument(entry: QueueEntry) -> bytes:
    """Cached tokens by instance as `warm_tokens` of `take.lua` reads them; lengths, so that names hold anything."""
    parts = []
    for instance, cached in entry.warm:
        name = instance.encode()
        parts.append(b"%d|%d|%s" % (cached, len(name), name))
    return b"".join(parts)


def turn_arguments(turn: Turn) -> list[Argument]:
    """A turn as `turn.lua` reads it."""
    arguments: list[Argument] = [len(turn.endings), len(turn.entries), turn.limit]
    for ending in turn.endings:
        arguments += (ending.attempt, int(ending.outcome is Outcome.DONE))
        arguments += (ending.used.input, ending.used.cached, ending.used.output, ending.run_ms)
    for entry, room in turn.entries:
        arguments += (entry.attempt, entry.tenant_id, entry.version, CLASSES.index(entry.priority_class) + 1)
        arguments += (entry.input_tokens, entry.max_output_tokens, entry.deadline_ms, entry.weight_milli, entry.payload)
        arguments += (room.queue_limit, room.slots, room.start_after_ms, warm_argument(entry), room.token_limit)
        arguments += (room.wait_most_ms, queues_argument(entry))
    for offer in turn.offers:
        arguments += (offer.instance, offer.version, offer.slots, offer.place)
        arguments += (offer.part.value, offer.token_us, offer.load_us, offer.handoff_us, offer.owner)
    return arguments


def queues_argument(entry: QueueEntry) -> str:
    """The further queues that the entry counts in: scope, requests and tokens of each. Scopes have no spaces."""
    return " ".join(f"{each.scope} {each.requests} {each.tokens}" for each in entry.queues) if entry.queues else ""


def turn_done(reply: Sequence[Any]) -> TurnDone:
    """The answer of `turn.lua`."""
    finished, queued, granted, refused = reply
    return TurnDone(
        tuple(Settled(VersionKey(each.decode())) if each else NotHeld() for each in finished),
        tuple(enqueued(each) for each in queued),
        Taken(tickets(granted), tickets(refused)),
    )


def enqueued(reply: Sequence[Any]) -> Enqueued:
    """The answer of `enqueue.lua`."""
    match reply[0]:
        case b"known":
            return Known(Standing(reply[1].decode()))
        case b"full":
            return QueueFull(int(reply[1]), reply[2].decode())
        case b"late":
            return TooLate(int(reply[1]))
        case b"shed":
            return Shed(int(reply[1]))
        case _:
            return Queued(int(reply[1]), int(reply[2]))


def tickets(replies: Sequence[Sequence[Any]]) -> tuple[Ticket, ...]:
    """Tickets in the order of the reply."""
    return tuple(_ticket(reply) for reply in replies)


def _ticket(reply: Sequence[Any]) -> Ticket:
    return Ticket(
        attempt=AttemptId(reply[0].decode()),
        standing=Standing(reply[1].decode()),
        payload=reply[2],
        enqueued_ms=int(reply[3]),
        version=VersionKey(reply[4].decode()),
        priority_class=CLASSES[int(reply[5]) - 1],
        place=reply[6],
        granted_ms=int(reply[7]),
        lease_expires_ms=int(reply[8]),
        ended_ms=int(reply[9]),
        reason=reply[10].decode(),
        message=reply[11].decode(),
        used=Tokens(int(reply[12]), int(reply[13]), int(reply[14])),
        prefill_place=reply[15],
    )


def pool_state(reply: Sequence[Any]) -> PoolState:
    """The answer of `snapshot.lua`."""
    revision, lanes, in_use, used, drains, loads, failures, owners = reply
    return PoolState(
        revision=int(revision),
        depths=tuple(
            sorted((_depth(lane) for lane in lanes), key=lambda d: (d.version, CLASSES.index(d.priority_class)))
        ),
        in_use={InstanceKey(name.decode()): int(count) for name, count in _pairs(in_use)},
        used_ms={InstanceKey(name.decode()): int(float(time)) for name, time in _pairs(used)},
        drains={InstanceKey(name.decode()): _drain_mark(value.decode()) for name, value in _pairs(drains)},
        loads={VersionKey(name.decode()): _load_claim(value.decode()) for name, value in _pairs(loads)},
        failures=dict(_failure(name.decode(), value.decode()) for name, value in _pairs(failures)),
        owners={InstanceKey(name.decode()): TenantId(value.decode()) for name, value in _pairs(owners)},
    )


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _depth(lane: Sequence[Any]) -> LaneDepth:
    number, _, version = lane[0].decode().partition(":")
    return LaneDepth(VersionKey(version), CLASSES[int(number) - 1], int(lane[1]), int(lane[2]), int(lane[3]))


def _drain_mark(value: str) -> DrainMark:
    until_ms, stage, length, rest = value.split("|", 3)
    raw = rest.encode()  # Lua counts bytes
    of, purpose = raw[: int(length)].decode(), raw[int(length) :].decode()
    return DrainMark(VersionKey(purpose), int(until_ms), DrainStage(stage), VersionKey(of))


def _load_claim(value: str) -> LoadClaim:
    until_ms, amount, length, rest = value.split("|", 3)
    size, _, devices = amount.partition(":")
    raw = rest.encode()  # Lua counts bytes
    node, owner = raw[: int(length)].decode(), raw[int(length) :].decode()
    return LoadClaim(
        NodeId(node), owner, int(until_ms), int(size), tuple(map(int, devices.split(",") if devices else ()))
    )


def claimed_amount(claim: LoadClaim) -> str:
    """Bytes and devices of a claim, as one word that `load.lua` keeps without reading it."""
    return f"{claim.bytes}:{','.join(map(str, claim.devices))}"


def _failure(name: str, value: str) -> tuple[tuple[VersionKey, NodeId], LoadFailure]:
    length, _, rest = name.partition(":")
    raw = rest.encode()
    node, version = raw[: int(length)].decode(), raw[int(length) :].decode()
    retry_at_ms, tries, cause = value.split("|", 2)
    return (VersionKey(version), NodeId(node)), LoadFailure(int(retry_at_ms), int(tries), cause)
