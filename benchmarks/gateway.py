"""What a gateway costs: `python -m benchmarks gateway [--litellm PATH] [--requests N] [--callers 1,16,64]`.

In one run over the same fast upstreams (32 tokens, no delay): the upstream called directly, LiteLLM's proxy in front of
it (where its program is given), and our whole mesh, with limits, fair queue, bus, store and bills, in front of a node
of the same kind. CPU is read from /proc, for each process: the figure that other load disturbs least. Latencies are
those of the caller, who shares the cores.
"""

import argparse
import asyncio
import resource
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.gateway_mesh import FAST, HOLD, TENANT, GatewayMesh, gateway_mesh, python_program
from benchmarks.http_load import Caller, Target, http_load, open_callers
from benchmarks.litellm_proxy import litellm_proxy
from benchmarks.processes import cpu_seconds_by_group, resident_bytes, until_at_rest
from benchmarks.report import Figure, Goal, Report
from benchmarks.streams import Load
from deploy.local.ports import free_ports
from deploy.local.server import LocalServer

NAME = "gateway"
DESCRIPTION = "CPU, latency and memory of the gateway and the mesh behind it, beside LiteLLM's proxy"

TOKENS = 32
WARM_REQUESTS = 200
IDLE_STREAMS = (1_000, 5_000)
IDLE_S = 5.0  # of open streams that say nothing, whose processor time is measured
GATEWAY_GOALS = {"stream": 3.5, "whole": 1.5}  # CPU seconds per 1,000 requests: LiteLLM's divided by 30 and by 20
MESH_GOALS = {"stream": 5.0, "whole": 2.5}  # level with Dynamo's front end and mock worker
STALL_MS = 40.0  # Nagle's algorithm against delayed acknowledgement
MESH_PARTS = ("gateway", "scheduler", "valkey", "nats", "metering")


@dataclass(slots=True)
class Figures:
    """What is known so far."""

    figures: dict[str, Figure] = field(default_factory=dict)
    limits: dict[str, Figure] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)


def run(arguments: Sequence[str]) -> Report:
    """Measure direct, LiteLLM and ours, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gateway", description=DESCRIPTION)
    parser.add_argument("--requests", type=int, default=2_000, help="requests at each level (default 2000)")
    parser.add_argument("--callers", default="1,16,64", help="levels of concurrent callers (default 1,16,64)")
    parser.add_argument("--litellm", type=Path, help="LiteLLM's program, in a virtual environment of its own")
    parser.add_argument("--litellm-requests", type=int, default=300, help="at each of its levels (default 300)")
    parser.add_argument("--without-idle", action="store_true", help="do not hold idle streams")
    options = parser.parse_args(arguments)
    _raise_file_limit()
    return uvloop.run(_measure(options))


def _raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _measure(options: argparse.Namespace) -> Report:
    levels = [int(level) for level in options.callers.split(",")]
    result = Figures({"tokens_per_request": TOKENS, "requests_per_level": options.requests})
    async with _upstream() as upstream:
        direct = await _levels(result, "direct", upstream, {}, levels, options.requests)
        await _litellm(result, options, upstream, levels, direct)
    async with gateway_mesh() as mesh:
        ours = Target("roundhouse", mesh.http_port, mesh.mesh.keys[TENANT], FAST, TOKENS)
        await http_load(ours, callers=16, requests=WARM_REQUESTS, stream=True)
        await _levels(result, "roundhouse", ours, mesh.process_groups, levels, options.requests, direct)
        _add_goals(result, levels)
        if not options.without_idle:
            await _idle_streams(result, mesh)
    return Report(NAME, result.figures, result.limits, result.goals)


@asynccontextmanager
async def _upstream() -> AsyncIterator[Target]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="rh-bench-") as folder:
        arguments = [str(port), str(TOKENS)]
        server = LocalServer(python_program("direct", "benchmarks.fake_openai", arguments, port, Path(folder, "log")))
        server.spawn()
        try:
            await asyncio.to_thread(server.wait_ready)
            yield Target("direct", port, "none", FAST, TOKENS)
        finally:
            await asyncio.to_thread(server.stop)


async def _litellm(
    result: Figures, options: argparse.Namespace, upstream: Target, levels: Sequence[int], direct: Mapping[str, Load]
) -> None:
    if options.litellm is None:
        result.figures["litellm"] = "skipped: give its program with --litellm"
        return
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rh-litellm-")))
        port, group, key = await stack.enter_async_context(litellm_proxy(options.litellm, upstream.port, FAST, folder))
        target = Target("litellm", port, key, FAST, TOKENS)
        await http_load(target, callers=4, requests=50, stream=True)
        await _levels(result, "litellm", target, {"litellm": group}, levels, options.litellm_requests, direct)


async def _levels(
    result: Figures,
    name: str,
    target: Target,
    groups: Mapping[str, int],
    levels: Sequence[int],
    requests: int,
    direct: Mapping[str, Load] | None = None,
) -> dict[str, Load]:
    """Every level, streaming and not; adds the figures and returns the loads by what they are called."""
    loads: dict[str, Load] = {}
    for level in levels:
        for kind in ("stream", "whole"):
            before = cpu_seconds_by_group(groups)
            load = await http_load(target, callers=level, requests=requests, stream=kind == "stream")
            await until_at_rest(groups)
            after = cpu_seconds_by_group(groups)
            cpu = {part: (after[part] - before[part]) * 1000 / requests for part in groups}
            loads[f"{kind}_{level}"] = load
            _add_level(result, name, f"{kind}_at_{level}", load, cpu, (direct or {}).get(f"{kind}_{level}"))
    return loads


def _add_level(result: Figures, name: str, at: str, load: Load, cpu: Mapping[str, float], direct: Load | None) -> None:
    into = result.limits if name == "direct" else result.figures
    into[f"{name}_requests_per_second_{at}"] = load.per_second
    for part, seconds in cpu.items():
        into[f"{name}_cpu_s_per_1000_{part}_{at}"] = seconds
    if name == "roundhouse":
        into[f"{name}_cpu_s_per_1000_mesh_{at}"] = sum(cpu[part] for part in MESH_PARTS)
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        if direct is None:
            into[f"{name}_total_ms_{label}_{at}"] = load.total_ms(share)
            continue
        into[f"{name}_added_total_ms_{label}_{at}"] = load.total_ms(share) - direct.total_ms(share)
        if at.startswith("stream"):
            added = load.first_token_ms(share) - direct.first_token_ms(share)
            into[f"{name}_added_first_token_ms_{label}_{at}"] = added


def _add_goals(result: Figures, levels: Sequence[int]) -> None:
    for kind in ("stream", "whole"):
        for level in levels:
            at = f"{kind}_at_{level}"
            gateway = float(result.figures[f"roundhouse_cpu_s_per_1000_gateway_{at}"])
            whole = float(result.figures[f"roundhouse_cpu_s_per_1000_mesh_{at}"])
            result.goals.append(Goal.at_most(f"gateway's CPU s per 1,000, {at}", GATEWAY_GOALS[kind], gateway))
            result.goals.append(Goal.at_most(f"mesh's CPU s per 1,000, {at}", MESH_GOALS[kind], whole))
    # A stall of Nagle's kind meets every answer; the median shows it, and a busy machine does not blur it.
    added = float(result.figures[f"roundhouse_added_total_ms_p50_stream_at_{levels[0]}"])
    goal = f"added p50 of {levels[0]} streaming callers, ms: no 40 ms stall"
    result.goals.append(Goal.at_most(goal, STALL_MS, added))


async def _idle_streams(result: Figures, mesh: GatewayMesh) -> None:
    """Open streams that say one token and then nothing; what they cost in memory, and whether all stay open."""
    target = Target("roundhouse", mesh.http_port, mesh.mesh.keys[TENANT], HOLD, 512)
    request, groups = target.request(stream=True), {"gateway": mesh.process_groups["gateway"]}
    callers: list[Caller] = []
    empty = resident_bytes(groups)["gateway"]
    for count in IDLE_STREAMS:
        while len(callers) < count:
            more = await open_callers(target.port, min(100, count - len(callers)))
            await asyncio.gather(*(caller.send(request) for caller in more))
            callers += more
        await until_at_rest(groups)
        grown = resident_bytes(groups)["gateway"] - empty
        result.figures[f"gateway_bytes_per_1000_open_streams_at_{count}"] = round(grown * 1000 / count)
        before = cpu_seconds_by_group(mesh.process_groups)
        await asyncio.sleep(IDLE_S)  # what is measured
        after = cpu_seconds_by_group(mesh.process_groups)
        for part in MESH_PARTS:
            result.figures[f"cpu_share_{part}_with_{count}_idle_streams"] = (after[part] - before[part]) / IDLE_S
    held = sum(caller.is_open for caller in callers)
    result.goals.append(Goal.at_least("idle streams held", IDLE_STREAMS[-1], held))
    for caller in callers:
        caller.close()
