"""The outbox of usage events on disk: kills, cuts, damage, full disks, and who takes over from whom."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.clock import SystemClock
from roundhouse.errors import Unavailable
from roundhouse.lifecycle import Lifecycle
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1.usage_pb2 import UsageData, UsageEvent
from services.gateway.adapters.outbox.attempt_slots import TEMPLATE_BYTES_MAX, AttemptSlots
from services.gateway.adapters.outbox.event_log import Damage, EventLog, Record, parse
from services.gateway.adapters.outbox.folder import OutboxFolder
from services.gateway.adapters.usage_outbox import UsageOutbox
from tests.fakes.event_bus import FakeBus

NOW_MS = 1_800_000_000_000


def event(number: int, *, output: int = 5) -> UsageEvent:
    """One event of a request of its own."""
    data = UsageData(request_id=f"r{number}", attempt=1, emitter="gateway", input_tokens=7, output_tokens=output)
    return UsageEvent(id=f"r{number}/1", source="c", subject="t1", time_unix_ms=NOW_MS, data=data)


def started(number: int) -> UsageEvent:
    """The template of an attempt that began at `NOW_MS`."""
    template = event(number, output=0)
    template.data.outcome = Outcome.ABANDONED.to_wire()
    return template


def reopened(root: Path, instance: str = "g1") -> tuple[list[UsageEvent], OutboxFolder]:
    """What a gateway finds that starts on a folder."""
    folder = OutboxFolder.open(root, instance)
    return [found for found, _ in folder.take_over(NOW_MS).events], folder


def test_what_was_recorded_is_found_by_the_next_process(tmp_path: Path) -> None:
    """Two events recorded and not published: the next process on the folder has both, in order, and a third finds
    none of them after they were acknowledged."""

    async def first() -> None:
        outbox = UsageOutbox(FakeBus(), folder=OutboxFolder.open(tmp_path, "g1"))
        await outbox.record(event(1))
        await outbox.record(event(2))
        outbox.close()

    asyncio.run(first())

    async def second() -> FakeBus:
        bus = FakeBus()
        outbox = UsageOutbox(bus, folder=OutboxFolder.open(tmp_path, "g1"))
        assert outbox.take_over(NOW_MS) == []
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            outbox.start(lifecycle, SystemClock())
            assert await outbox.drain(5) == 0
            lifecycle.cancel_tasks()
        outbox.close()
        return bus

    assert sorted(asyncio.run(second()).durable) == ["r1/1/gateway", "r2/1/gateway"]
    assert reopened(tmp_path)[0] == []


CHILD = """
    import os, signal, sys
    from pathlib import Path
    from roundhouse.wire.v1.usage_pb2 import UsageEvent
    from services.gateway.adapters.outbox.folder import OutboxFolder
    from tests.unit.gateway.test_outbox import event, started
    folder = OutboxFolder.open(Path(sys.argv[1]), sys.argv[2])
    folder.slots.alive_ms = 1_800_000_002_500
    running, silent, ended = (folder.begin(started(number), "shared") for number in (1, 2, 3))
    for tokens in range(1, 124):
        running.note(7, 4, tokens)
    silent.note(7, 0, 0)
    ended.note(7, 0, 9)
    folder.log.append(event(3, output=9).SerializeToString())  # its end is kept, its slot not yet given back
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_gateway(root: Path, instance: str = "g1") -> None:
    """A process that runs three attempts in its outbox and is killed."""
    script = textwrap.dedent(CHILD)
    ended = subprocess.run([sys.executable, "-c", script, str(root), instance], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL


def test_a_killed_process_leaves_the_exact_counts_of_what_ran(tmp_path: Path) -> None:
    """Invariant 13: kill -9 after the 123rd token: the successor has one event with 123 tokens that ran 2.5 s, one of
    the attempt without a token, which costs nothing, and the one that had ended as it ended, once."""
    killed_gateway(tmp_path)
    folder = OutboxFolder.open(tmp_path, "g1")
    left = folder.take_over(NOW_MS)
    events = {found.id: found for found, _ in left.events}
    assert sorted(events) == ["r1/1", "r2/1", "r3/1"]
    running = events["r1/1"]
    assert (running.data.input_tokens, running.data.cached_tokens, running.data.output_tokens) == (7, 4, 123)
    assert (running.time_unix_ms, running.data.run_ms) == (NOW_MS + 2_500, 2_500)
    assert running.data.outcome == Outcome.ABANDONED.to_wire()
    assert (events["r2/1"].data.input_tokens, events["r2/1"].data.output_tokens) == (0, 0)
    assert events["r3/1"] == event(3, output=9)
    assert [(each.request_id, each.pool, each.output_tokens) for each in left.finishes] == [
        ("r1", "shared", 123),
        ("r2", "shared", 0),
    ]


def test_a_successor_that_is_killed_too_repeats_the_same_events(tmp_path: Path) -> None:
    """Taking over is itself kept before anything is published: the third process finds what the second found."""
    killed_gateway(tmp_path)
    second, folder = reopened(tmp_path)
    folder.close()  # as the kernel does at a kill
    assert reopened(tmp_path)[0] == second


def test_the_folder_of_a_dead_sibling_is_taken_over_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    """A gateway with another name on the same volume publishes what the dead one left; the living one keeps its own."""
    killed_gateway(tmp_path, "dead")
    living = OutboxFolder.open(tmp_path, "living")
    living.log.append(event(9).SerializeToString())
    found, folder = reopened(tmp_path, "new")
    assert sorted(each.id for each in found) == ["r1/1", "r2/1", "r3/1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["living", "new"]
    folder.close()
    assert sorted(each.id for each in reopened(tmp_path, "new")[0]) == ["r1/1", "r2/1", "r3/1"]


class Killed(BaseException):
    """Stands for a kill at one instruction."""


def test_a_successor_that_is_killed_while_it_takes_over_leaves_what_can_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its own copy of a dead sibling's event and the deletion there, so that both logs have it: the next
    process publishes the event and another one, and goes on."""
    dead = OutboxFolder.open(tmp_path, "g1")
    dead.log.append(event(1).SerializeToString())
    dead.close()

    def killed(_: EventLog) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "remove", killed)
        successor = OutboxFolder.open(tmp_path, "g2")
        with pytest.raises(Killed):
            successor.take_over(NOW_MS)
        successor.close()

    async def third() -> FakeBus:
        bus = FakeBus()
        outbox = UsageOutbox(bus, folder=OutboxFolder.open(tmp_path, "g2"))
        outbox.take_over(NOW_MS)
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            outbox.start(lifecycle, SystemClock())
            await outbox.record(event(2))
            assert await outbox.drain(5) == 0
            lifecycle.cancel_tasks()
        outbox.close()
        return bus

    assert sorted(asyncio.run(third()).durable) == ["r1/1/gateway", "r2/1/gateway"]
    assert reopened(tmp_path, "g2")[0] == []


def test_two_gateways_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """The second one does not start, and says what to change."""
    _folder = OutboxFolder.open(tmp_path, "g1")
    with pytest.raises(Unavailable, match="give each its own name"):
        OutboxFolder.open(tmp_path, "g1")


def test_a_torn_end_is_cut_and_damage_in_the_middle_is_put_aside(tmp_path: Path) -> None:
    """Three records, the second with a flipped byte, the third cut: the first is found, the second's bytes are in the
    side file, the third is gone; a second look finds the same."""
    folder = OutboxFolder.open(tmp_path, "g1")
    for number in (1, 2, 3):
        folder.log.append(event(number).SerializeToString())
    folder.close()
    (segment,) = (tmp_path / "g1").glob("events-*.log")
    data = bytearray(segment.read_bytes())
    size = len(data) // 3
    data[size + 20] ^= 0xFF
    segment.write_bytes(data[:-5])
    for look in range(2):
        folder = OutboxFolder.open(tmp_path, "g1")
        left = folder.take_over(NOW_MS)
        assert [found.id for found, _ in left.events] == ["r1/1"]
        assert (left.damaged, left.torn) == (1, 1 - look)
        folder.close()
    assert (tmp_path / "g1" / "quarantine.bin").read_bytes().startswith(data[size : 2 * size])


@given(
    payloads=st.lists(st.binary(max_size=60), max_size=6),
    cut=st.integers(0, 400),
    flips=st.lists(st.integers(0, 400), max_size=3),
)
def test_damage_costs_only_what_it_touches(payloads: list[bytes], cut: int, flips: list[int]) -> None:
    """Whatever is flipped or cut, every untouched record is read, in order, and nothing that was not written."""
    whole, spans = bytearray(), []
    for payload in payloads:
        begin = len(whole)
        whole += _record(payload)
        spans.append((begin, len(whole), payload))
    end = max(0, len(whole) - cut)
    damaged = whole[:end]
    touched = {place for place in flips if place < end}
    for place in touched:
        damaged[place] ^= 0x5A
    expected = [text for begin, stop, text in spans if stop <= end and not any(begin <= at < stop for at in touched)]
    found = list(parse(bytes(damaged), 1, is_last=True))
    assert [each.payload for each in found if isinstance(each, Record)] == expected
    assert sum(len(each.data) for each in found if isinstance(each, Damage)) == len(damaged) - sum(
        12 + len(text) for text in expected
    )


def _record(payload: bytes) -> bytes:
    import struct
    import zlib

    return struct.pack("<4sII", b"RHU1", len(payload), zlib.crc32(payload)) + payload


def test_segments_go_when_their_events_are_acknowledged(tmp_path: Path) -> None:
    """Segments of 100 bytes with one event of 50 each, acknowledged out of order: no file is left but the one that is
    written, and that is emptied."""
    log = EventLog(tmp_path, segment_bytes=100)
    segments = [log.append(b"x" * 50) for _ in range(6)]
    for segment in reversed(segments):
        log.acknowledge(segment)
    log.trim()
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size == 0
    log.close()


def test_slots_are_used_again_and_bounded(tmp_path: Path) -> None:
    """Two slots: a third attempt gets none; a template that is too long gets none; one given back is free again."""
    slots = AttemptSlots(tmp_path / "slots", slots=2)
    first, second = slots.take(b"a"), slots.take(b"b")
    assert first is not None
    assert second is not None
    assert slots.take(b"c") is None
    slots.give_back(first.number)
    assert slots.take(b"x" * (TEMPLATE_BYTES_MAX + 1)) is None
    third = slots.take(b"d")
    assert third is not None
    third.note(2**32 - 1, 2**32 - 1, 2**32 - 1)
    found = {slot.template: slot for slot in AttemptSlots(tmp_path / "slots", slots=2).open_slots()}
    assert found[b"d"].input_tokens == found[b"d"].cached_tokens == found[b"d"].output_tokens == 2**32 - 1
    assert found[b"b"].output_tokens == 0


def test_a_full_disk_refuses_new_work_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses a write: the event is still published, new work is refused with the reason, an alarm is on; once
    the disk takes writes again, all is well, and a kill in between would have found the counts in the slot."""

    async def scenario() -> None:
        bus = FakeBus()
        bus.connected = False
        folder = OutboxFolder.open(tmp_path, "g1")
        outbox = UsageOutbox(bus, folder=folder)
        full = {"is": True}
        write = os.write

        def refusing(handle: int, data: bytes) -> int:
            if full["is"]:
                raise OSError(28, "No space left on device")
            return write(handle, data)

        monkeypatch.setattr("services.gateway.adapters.outbox.event_log.os.write", refusing)
        async with asyncio.TaskGroup() as tasks:
            lifecycle = Lifecycle(tasks)
            outbox.start(lifecycle, SystemClock())
            outbox.begin(started(1), "shared").note(7, 0, 5)
            await outbox.record(event(1))
            refused = (outbox.has_room, outbox.full_reason, outbox.alarm)
            assert refused == (
                False,
                "the outbox of usage events cannot be written.",
                "usage events cannot be written to disk: No space left on device",
            )
            assert [slot.output_tokens for slot in folder.slots.open_slots()] == [5]
            full["is"] = False
            async with asyncio.timeout(30):
                while outbox.alarm is not None:  # noqa: ASYNC110 - the upkeep's own turn, on real threads
                    await asyncio.sleep(0.01)
            assert (outbox.has_room, outbox.full_reason) == (True, "")
            assert list(folder.slots.open_slots()) == []
            bus.connected = True
            assert await outbox.drain(10) == 0
            lifecycle.cancel_tasks()
        assert sorted(bus.durable) == ["r1/1/gateway"]

    asyncio.run(scenario())


def test_a_stream_that_is_away_alarms_before_it_refuses() -> None:
    """Of 4 events at most: 1 is well, 2 alarm, 4 refuse, and the reason names the number."""

    async def scenario() -> list[Any]:
        outbox = UsageOutbox(FakeBus(), events_max=4)
        seen = []
        for number in range(1, 5):
            await outbox.record(event(number))
            seen.append((outbox.alarm is None, outbox.has_room))
        assert outbox.full_reason == "4 usage events wait for the event stream."
        return seen

    assert asyncio.run(scenario()) == [(True, True), (False, True), (False, True), (False, False)]
