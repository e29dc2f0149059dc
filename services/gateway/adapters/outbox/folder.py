"""The folder of one gateway's outbox, and what dead gateways left in theirs.

    ROOT/INSTANCE/lock              held while its gateway lives; the kernel lets go when it dies
    ROOT/INSTANCE/events-*.log      usage events that the stream may not have (`event_log`)
    ROOT/INSTANCE/attempts.slots    where running attempts stand (`attempt_slots`)
    ROOT/INSTANCE/quarantine.bin    bytes that were no records

Invariant: whoever holds the lock owns the folder. A gateway that starts takes over its own folder and every sibling
whose owner is dead. Events are appended here before they are deleted there: a kill in the middle repeats, never loses.
"""

import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from roundhouse.errors import Unavailable
from roundhouse.subjects import encode_token
from roundhouse.wire.v1.scheduling_pb2 import Finished
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from services.gateway.adapters.outbox.attempt_slots import AttemptSlots, OpenSlot, SlotJournal
from services.gateway.adapters.outbox.event_log import Damage, EventLog, Record
from services.gateway.operations.accounting import abandoned_event, abandoned_finish

log = structlog.get_logger(__name__)

LOCK_PAUSE_S: Final = 0.05
LOCK_TRIES: Final = 20  # a gateway that starts may just be looking into a sibling's folder; its look takes milliseconds
_LOCK, _SLOTS, _QUARANTINE = "lock", "attempts.slots", "quarantine.bin"


@dataclass(slots=True)
class Leftovers:
    """What earlier processes had not finished, all of it in this gateway's log now."""

    events: list[tuple[UsageEvent, int]] = field(default_factory=list)  # with the segment that holds it
    finishes: list[Finished] = field(default_factory=list)  # of attempts that were running, for the scheduler
    damaged: int = 0  # runs of bytes that are no record
    torn: int = 0  # records that a kill or a power cut left half-written


class OutboxFolder:
    """One gateway's folder, owned. Make it with `OutboxFolder.open`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.log = EventLog(path)
        self.slots = AttemptSlots(path / _SLOTS)

    @classmethod
    def open(cls, root: Path, instance_id: str) -> "OutboxFolder":
        """Own the folder of `instance_id`. Raises Unavailable: another process has it, or the disk refuses."""
        path = root / encode_token(instance_id)
        try:
            for _ in range(LOCK_TRIES):
                path.mkdir(parents=True, exist_ok=True)
                lock = _locked(path)
                if lock is not None:
                    return cls(path, lock)
                time.sleep(LOCK_PAUSE_S)  # nothing else runs yet
        except OSError as error:
            raise Unavailable(f"the usage outbox {path} cannot be used: {error.strerror}") from error
        raise Unavailable(f"the usage outbox {path} belongs to another gateway that runs: give each its own name")

    def take_over(self, now_ms: int) -> Leftovers:
        """Everything that earlier processes left, here and beside here. Call once, first. Raises Unavailable."""
        found = Leftovers()
        try:
            self._read_log(found)
            self._end_attempts(self.slots, found, now_ms)
            for sibling in sorted(self.path.parent.iterdir()):
                if sibling != self.path and sibling.is_dir() and (sibling / _LOCK).exists():
                    self._adopt(sibling, found, now_ms)
            self.log.syncing()()
        except OSError as error:
            raise Unavailable(f"the usage outbox {self.path} cannot be read: {error.strerror}") from error
        return found

    def begin(self, event: UsageEvent, pool: str) -> SlotJournal | None:
        """Note that an attempt runs; None if there is no place for it."""
        name = pool.encode()
        return self.slots.take(bytes((len(name),)) + name + event.SerializeToString())

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        self.log.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read_log(self, found: Leftovers) -> None:
        read = self.log.read()
        for each in read:
            event = self._event(each, found)
            if event is not None:
                found.events.append((event, each.segment))
        self.log.forget_damage(read)

    def _adopt(self, sibling: Path, found: Leftovers, now_ms: int) -> None:
        lock = _locked(sibling)
        if lock is None:
            return  # it lives
        try:
            theirs = OutboxFolder(sibling, lock)
            for each in theirs.log.read():
                event = self._event(each, found)
                if event is not None:
                    self._keep(event, found)
            self._end_attempts(theirs.slots, found, now_ms)
            self.log.syncing()()
            theirs.log.remove()
            (sibling / _SLOTS).unlink()
            if (sibling / _QUARANTINE).exists():
                self._put_aside((sibling / _QUARANTINE).read_bytes())
                (sibling / _QUARANTINE).unlink()
            (sibling / _LOCK).unlink()
            sibling.rmdir()
            log.warning("usage_outbox_adopted", folder=sibling.name)
        finally:
            os.close(lock)

    def _end_attempts(self, slots: AttemptSlots, found: Leftovers, now_ms: int) -> None:
        """One event for each attempt that was running. One whose event is in the log had just ended."""
        ended = {event.id for event, _ in found.events}
        for slot in slots.open_slots():
            read = _read_template(slot)
            if read is None:
                found.torn += 1
            elif read[1].id not in ended:
                self._end_attempt(slot, *read, slots.alive_ms or now_ms, found)
            slots.give_back(slot.number)

    def _end_attempt(self, slot: OpenSlot, pool: str, template: UsageEvent, at_ms: int, found: Leftovers) -> None:
        counts = (slot.input_tokens, slot.cached_tokens, slot.output_tokens)
        event = abandoned_event(template, *counts, ended_ms=at_ms)
        self._keep(event, found)
        found.finishes.append(abandoned_finish(event, pool))

    def _keep(self, event: UsageEvent, found: Leftovers) -> None:
        found.events.append((event, self.log.append(event.SerializeToString())))

    def _event(self, each: Record | Damage, found: Leftovers) -> UsageEvent | None:
        if isinstance(each, Record):
            try:
                return UsageEvent.FromString(each.payload)
            except DecodeError:
                each = Damage(each.segment, each.payload, torn=False)
        if each.torn:
            found.torn += 1  # it was never whole, so nobody was told that it is kept
        else:
            found.damaged += 1
        self._put_aside(each.data)
        return None

    def _put_aside(self, data: bytes) -> None:
        with (self.path / _QUARANTINE).open("ab") as file:
            file.write(data)


def _read_template(slot: OpenSlot) -> tuple[str, UsageEvent] | None:
    if not slot.template:
        return None
    event_at = 1 + slot.template[0]
    try:
        return slot.template[1:event_at].decode(), UsageEvent.FromString(slot.template[event_at:])
    except (DecodeError, UnicodeDecodeError):
        return None


def _locked(folder: Path) -> int | None:
    """The lock of a folder that still exists once we hold it; None if another process has it or removed it."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(folder / _LOCK).st_ino == os.fstat(handle).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None
