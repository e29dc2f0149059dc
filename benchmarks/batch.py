"""A batch as large as they may be: `python -m benchmarks batch --lines 50000 [--kills 1]`.

One file of so many requests is uploaded and run by one gateway of a whole mesh over a fast fake node (32 tokens, no
delay). On the way the gateway is killed with SIGKILL (at even parts of the batch) and started again by its supervisor.
What must hold: exactly one result a line in the output and error files together, whatever is killed; the progress that
the API tells never falls; the gateway's memory does not grow with the lines that have run.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.gateway_mesh import FAST, TENANT, GatewayMesh, gateway_mesh
from benchmarks.processes import cpu_seconds_by_group, resident_bytes
from benchmarks.report import Figure, Goal, Report

NAME = "batch"
DESCRIPTION = "a batch of many lines over a fast fake node, with kills: one result a line, progress, memory"

LINES = 3_000  # half a minute; the most that a batch may have is 50,000
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 1.0  # a poll: the API has no events; progress is written once a second
AWAY_S_MAX = 60.0  # how long a killed gateway may be away
GROWTH_BYTES_MAX = 128 * 1024 * 1024  # a guess: places and results of 50,000 lines, and one file being written


@dataclass(slots=True)
class Seen:
    """What was seen of a batch while it ran."""

    batch: dict[str, Any]
    done: list[int] = field(default_factory=list)
    resident_most: int = 0
    kills: int = 0


def run(arguments: Sequence[str]) -> Report:
    """Start a mesh, run the batch, stop all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks batch", description=DESCRIPTION)
    parser.add_argument("--lines", type=int, default=LINES, help=f"requests of the batch (default {LINES})")
    parser.add_argument("--kills", type=int, default=1, help="how often the gateway is killed on the way (default 1)")
    options = parser.parse_args(arguments)
    return asyncio.run(_measure(options.lines, options.kills))


def content(lines: int) -> bytes:
    """The input file."""
    return b"".join(_lines(lines))


def _lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        body = {"model": FAST, "messages": [{"role": "user", "content": f"line {number}"}], "max_tokens": 32}
        line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line).encode() + b"\n"


async def _measure(lines: int, kills: int) -> Report:
    async with gateway_mesh() as mesh:
        timeout = aiohttp.ClientTimeout(total=120)
        headers = {"Authorization": f"Bearer {mesh.mesh.keys[TENANT]}"}
        async with aiohttp.ClientSession(mesh.mesh.http_url, headers=headers, timeout=timeout) as session:
            before, began = _resident(mesh), time.monotonic()
            made = await _started(session, content(lines))
            groups = {name: group for name, group in mesh.process_groups.items() if name != "node"}
            cpu = cpu_seconds_by_group(groups)
            seen = await _watched(mesh, session, made["id"], lines, kills)
            seconds = time.monotonic() - began
            after = cpu_seconds_by_group({**mesh.process_groups})
            results = await _results(session, seen.batch)
    # A killed process takes its CPU time along: the figure is what the living ones used.
    used = sum(max(0.0, after[name] - cpu[name]) for name in groups)
    return _report(lines, seen, results, seconds, seen.resident_most - before, used)


def _report(lines: int, seen: Seen, results: Counter[str], seconds: float, grown: int, cpu_s: float) -> Report:
    figures: dict[str, Figure] = {
        "lines": lines,
        "kills": seen.kills,
        "status": str(seen.batch["status"]),
        "seconds": seconds,
        "lines_per_second": lines / seconds,
        "gateway_bytes_grown_most": grown,
        "mesh_cpu_s_of_living_processes": cpu_s,
        "progress_reports": len(seen.done),
    }
    once = sum(count == 1 for count in results.values())
    falls = sum(later < earlier for earlier, later in zip(seen.done, seen.done[1:], strict=False))
    goals = [
        Goal("lines with exactly one result", f"= {lines}", once, once == lines and len(results) == lines),
        Goal("times that the progress fell", "= 0", falls, falls == 0),
        Goal.at_most("growth of the gateway's memory, bytes", GROWTH_BYTES_MAX, grown),
    ]
    return Report(NAME, figures, {}, goals)


async def _started(session: aiohttp.ClientSession, data: bytes) -> dict[str, Any]:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", data, filename="lines.jsonl", content_type="application/jsonl")
    async with session.post("/v1/files", data=form) as answer:
        answer.raise_for_status()
        file = await answer.json()
    wish = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with session.post("/v1/batches", json=wish) as answer:
        answer.raise_for_status()
        made: dict[str, Any] = await answer.json()
    return made


async def _watched(mesh: GatewayMesh, session: aiohttp.ClientSession, batch_id: str, lines: int, kills: int) -> Seen:
    """Look once a second until the batch has ended; kill the gateway at even parts of it."""
    seen = Seen({})
    away_since: float | None = None
    while True:
        try:
            async with session.get(f"/v1/batches/{batch_id}") as answer:
                answer.raise_for_status()
                seen.batch = await answer.json()
            away_since = None
        except aiohttp.ClientError:  # it was killed
            away_since = away_since or time.monotonic()
            assert time.monotonic() - away_since < AWAY_S_MAX, "the gateway does not come back"
        counts = seen.batch.get("request_counts") or {}
        done = int(counts.get("completed", 0)) + int(counts.get("failed", 0))
        seen.done.append(done)
        seen.resident_most = max(seen.resident_most, _resident(mesh))
        if seen.batch.get("status") in ENDED:
            return seen
        if seen.kills < kills and done >= lines * (seen.kills + 1) / (kills + 1):
            seen.kills += 1
            mesh.mesh.cluster.supervisor.server("gateway").kill()
        await asyncio.sleep(POLL_S)


async def _results(session: aiohttp.ClientSession, batch: dict[str, Any]) -> Counter[str]:
    """How many results each line has, over both files."""
    found: Counter[str] = Counter()
    for file_id in (batch.get("output_file_id"), batch.get("error_file_id")):
        if file_id:
            async with session.get(f"/v1/files/{file_id}/content") as answer:
                answer.raise_for_status()
                found.update(json.loads(line)["custom_id"] for line in (await answer.read()).splitlines())
    return found


def _resident(mesh: GatewayMesh) -> int:
    return resident_bytes({"gateway": mesh.process_groups["gateway"]})["gateway"]
