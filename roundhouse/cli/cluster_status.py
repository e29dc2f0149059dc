"""`roundhouse status`: each part with its health and cost, each node with what it has loaded."""

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.local.child import group_members, process_start_ticks
from deploy.local.home import ClusterState, Home, PartState
from deploy.local.leftovers import living_parts
from deploy.local.probes import http_probe, nats_probe, redis_probe
from deploy.local.sizes import show_bytes
from roundhouse import subjects
from roundhouse.cli.cluster_waits import waiting_models, waits_table
from roundhouse.errors import RoundhouseError
from roundhouse.event_bus import Message, NatsBus
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2

EXIT_NOT_READY = 1
EXIT_NOT_RUNNING = 3
NODE_STATE_WITHIN_S = 2.5  # loaders speak every second


async def show_status(home: Home, console: Console) -> int:
    """Print the tables; returns the exit code."""
    state = home.read_state()
    if state is None or not home.is_locked():
        console.print(f"not running ({home.root})")
        left = [name for name, _ in living_parts(state)] if state is not None else []
        if left:
            console.print(f"left by an earlier run: {', '.join(left)}; `roundhouse down` ends them")
        return EXIT_NOT_RUNNING
    reasons = await asyncio.gather(*(asyncio.to_thread(_why_not_ready, part) for part in state.parts))
    console.print(Text(f"{home.root}: http://127.0.0.1:{state.http_port}, admin http://127.0.0.1:{state.admin_port}"))
    console.print(_part_table(state, reasons))
    nodes = await _node_states(state)
    if nodes:
        console.print(_node_table(nodes))
    waiting = await waiting_models(state.nats_url)
    if waiting:
        console.print(waits_table(waiting))
    return 0 if state.ready and not any(reasons) else EXIT_NOT_READY


def _why_not_ready(part: PartState) -> str:
    if process_start_ticks(part.pid) != part.start_ticks:
        return "not running"
    probes = {"nats": partial(nats_probe, part.port), "valkey": partial(redis_probe, part.port)}
    if part.ops_port:
        return http_probe(part.ops_port, "/health/ready") or ""
    return (probes[part.name]() or "") if part.name in probes else ""


def _part_table(state: ClusterState, reasons: list[str]) -> Table:
    table = Table("part", "pid", "port", "health", "up", "memory", "restarts", box=None, pad_edge=False)
    now_ms = time.time_ns() // 1_000_000
    for part, reason in zip(state.parts, reasons, strict=True):
        health = Text(reason, "red") if reason else Text("ready", "green")
        uptime = _duration((now_ms - part.started_unix_ms) // 1000)
        memory = show_bytes(_group_memory(part.pid))
        table.add_row(part.name, str(part.pid), str(part.port), health, uptime, memory, str(part.restarts))
    return table


def _node_table(nodes: dict[str, loading_pb2.NodeState]) -> Table:
    table = Table("node", "device memory", "models", box=None, pad_edge=False)
    for node_id, node in sorted(nodes.items()):
        device = next((tier for tier in node.tiers if tier.tier == vocabulary_pb2.TIER_DEVICE), None)
        used = f"{show_bytes(device.resident + device.reserved)} of {show_bytes(device.capacity)}" if device else ""
        models = ", ".join(_say_instance(instance) for instance in node.instances) or "none"
        note = "" if node.accepting else f" (takes no work: {node.unhealthy_reason or 'draining'})"
        table.add_row(node_id, used, Text(models + note))
    return table


def _say_instance(instance: loading_pb2.Instance) -> str:
    state = vocabulary_pb2.InstanceState.Name(instance.state).removeprefix("INSTANCE_STATE_").lower()
    return instance.version.model if state == "ready" else f"{instance.version.model} ({state})"


async def _node_states(state: ClusterState) -> dict[str, loading_pb2.NodeState]:
    """The next state message of each node; fewer if the bus or a loader is away."""
    expected = sum(1 for part in state.parts if part.name.startswith("loader-"))
    nodes: dict[str, loading_pb2.NodeState] = {}
    complete = asyncio.Event()

    async def on_state(message: Message) -> None:
        node = loading_pb2.NodeState.FromString(message.data)
        nodes[node.node_id] = node
        if len(nodes) >= expected:
            complete.set()

    try:
        bus = await NatsBus.connect(state.nats_url, name="roundhouse-status")
    except RoundhouseError:
        return nodes
    subscription = await bus.subscribe(subjects.NODE_STATES, on_state)
    with suppress(TimeoutError):
        await asyncio.wait_for(complete.wait(), NODE_STATE_WITHIN_S)
    await subscription.stop()
    await bus.close()
    return nodes


def _group_memory(group: int) -> int:
    """Proportional bytes of a process group where the kernel tells them, else resident bytes."""
    return sum(_process_memory(pid) for pid in group_members(group))


def _process_memory(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _duration(seconds: int) -> str:
    minutes, second = divmod(max(0, seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}h{minute:02}m" if hours else f"{minute}m{second:02}s" if minute else f"{second}s"
