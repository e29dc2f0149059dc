"""The supervisor with real processes: order, restarts with back-off, and an end that leaves nothing."""

import asyncio
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from deploy.local.child import Command, group_members
from deploy.local.parts import Part, Tier
from deploy.local.ports import free_ports
from deploy.local.probes import http_probe
from deploy.local.server import PartFailed, Program
from deploy.local.supervisor import PartEvent, Phase, Supervisor


def web_part(name: str, tier: Tier, folder: Path) -> Part:
    """A part that serves an empty folder over HTTP."""
    (port,) = free_ports(1)
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    probe = partial(http_probe, port, "/")
    return Part(Program(name, Command(argv, folder / f"{name}.log", directory=folder), probe, port), tier, probe)


def failing_part(name: str, folder: Path) -> Part:
    """A part that says why it cannot start, and ends with code 3."""
    script = "import sys; sys.exit('the ledger is locked')"
    probe = partial(http_probe, 9, "/")
    return Part(
        Program(name, Command([sys.executable, "-c", script], folder / f"{name}.log"), probe, 9), Tier.EDGE, probe
    )


async def seen(events: list[PartEvent], part: str, phase: Phase, times: int = 1) -> None:
    """Wait until the event came `times` times."""
    async with asyncio.timeout(60):
        while [(event.part, event.phase) for event in events].count((part, phase)) < times:  # noqa: ASYNC110 - a plain callback fills it
            await asyncio.sleep(0.02)


async def test_stores_start_before_services_and_stop_after_them(tmp_path: Path) -> None:
    """The gateway starts only when the store serves; at the end it is gone before the store is asked to stop."""
    events: list[PartEvent] = []
    parts = (web_part("gateway", Tier.EDGE, tmp_path), web_part("nats", Tier.STORE, tmp_path))
    supervisor = Supervisor(parts, events.append)
    await supervisor.start()
    groups = [state.pid for state in supervisor.states()]
    await supervisor.stop()
    story = [(event.part, event.phase) for event in events]
    assert story == [
        ("nats", Phase.STARTING),
        ("nats", Phase.SERVING),
        ("gateway", Phase.STARTING),
        ("gateway", Phase.SERVING),
        ("gateway", Phase.STOPPING),
        ("gateway", Phase.STOPPED),
        ("nats", Phase.STOPPING),
        ("nats", Phase.STOPPED),
    ]
    assert [group_members(group) for group in groups] == [[], []]


async def test_a_crashed_part_is_started_again_on_its_port_and_it_is_said(tmp_path: Path) -> None:
    """One line says how it ended and when it comes back; pid and restart count change, the port does not."""
    events: list[PartEvent] = []
    supervisor = Supervisor((web_part("loader-1", Tier.NODE, tmp_path),), events.append)
    await supervisor.start()
    try:
        (before,) = supervisor.states()
        child = supervisor.server("loader-1").child
        assert child is not None
        child.send_signal(signal.SIGKILL)
        await seen(events, "loader-1", Phase.SERVING, times=2)
        (after,) = supervisor.states()
        crash = next(event for event in events if event.phase is Phase.CRASHED)
        assert crash.detail == "ended with signal 9; starting it again in 0.5 s"
        assert (after.port, after.restarts) == (before.port, 1)
        assert after.pid != before.pid
    finally:
        await supervisor.stop()


async def test_a_part_held_down_stays_down_until_released(tmp_path: Path) -> None:
    """Fault tests can keep a part away for as long as they want."""
    events: list[PartEvent] = []
    supervisor = Supervisor((web_part("scheduler", Tier.SCHEDULER, tmp_path),), events.append)
    await supervisor.start()
    try:
        supervisor.hold_down("scheduler")
        supervisor.server("scheduler").kill()
        await seen(events, "scheduler", Phase.CRASHED)
        await asyncio.sleep(0.8)  # longer than the first back-off of 0.5 s
        assert not supervisor.server("scheduler").alive
        supervisor.release("scheduler")
        await seen(events, "scheduler", Phase.SERVING, times=2)
    finally:
        await supervisor.stop()


async def test_a_part_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    """Case B48: SIGSTOP for longer than `hung_after_s` (1 s): it is said, and another process serves on the port."""
    events: list[PartEvent] = []
    part = replace(web_part("triton-1", Tier.ENGINE, tmp_path), hung_after_s=1.0)
    supervisor = Supervisor((part,), events.append)
    await supervisor.start()
    try:
        child = supervisor.server("triton-1").child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        await seen(events, "triton-1", Phase.SERVING, times=2)
        assert [event.detail for event in events if event.phase is Phase.HUNG] == ["does not answer for 1 s"]
    finally:
        await supervisor.stop()


async def test_a_part_that_cannot_start_ends_the_start_with_its_own_words(tmp_path: Path) -> None:
    """The failure has the exit code and the end of the log; the other parts are stopped by `stop`."""
    events: list[PartEvent] = []
    parts = (web_part("nats", Tier.STORE, tmp_path), failing_part("metering", tmp_path))
    supervisor = Supervisor(parts, events.append)
    with pytest.raises(PartFailed, match=r"metering ended with code 1\nthe ledger is locked"):
        await supervisor.start()
    await supervisor.stop()
    assert not supervisor.server("nats").alive


async def test_a_part_that_cannot_even_be_tried_is_tried_again(tmp_path: Path) -> None:
    """A file lies where its folder was when it ends: that is said, and once the folder is back, so is the part."""
    events: list[PartEvent] = []
    folder = tmp_path / "part"
    supervisor = Supervisor((web_part("metering", Tier.MEMORY, folder),), events.append)
    await supervisor.start()
    try:
        child = supervisor.server("metering").child
        assert child is not None
        folder.rename(tmp_path / "away")
        folder.write_text("in the way")
        child.send_signal(signal.SIGKILL)
        await seen(events, "metering", Phase.FAILED)
        folder.unlink()
        await seen(events, "metering", Phase.SERVING, times=2)
    finally:
        await supervisor.stop()
