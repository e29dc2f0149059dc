"""What the whole mesh costs on top of Triton: `python -m benchmarks path [--requests N] [--streams 1,16,64]`.

The same native Triton model (32 tokens, no delay) is called through the mesh by an HTTP client and straight over
Triton's gRPC, in turn, in one run. Reported: requests a second, added latency, CPU seconds per 1,000 requests of each
part, and where the time of a request goes by the ledger's own records. The client runs beside the servers and takes
part of the same cores; its CPU is reported too.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import yaml

from benchmarks.mesh import BenchmarkMesh, benchmark_mesh
from benchmarks.processes import cpu_seconds_by_group
from benchmarks.report import Figure, Goal, Report
from benchmarks.streams import Load, MeshClient, TritonClient, closed_loop
from deploy.local.parts import ClusterOptions
from roundhouse.vocabulary import RequestId
from services.gateway.adapters.triton_tensors import generate_message
from services.gateway.ports import EngineRequest
from tests.builders.checkpoints import knob_model

NAME = "path"
DESCRIPTION = "requests/s, added latency and CPU of the mesh over calling Triton directly"

TOKENS = 32
MODEL = "fast"
TENANT = "bench"
TURNS = 4
FIRST_TOKEN_MS = 5.0
STALL_MS = 40.0  # Nagle's algorithm against delayed acknowledgement
SLOTS = 64  # as many as the widest load, so that queueing is not what is measured
PARTS_ON_THE_PATH = ("gateway", "scheduler", "nats", "valkey", "metering", "triton", "loader", "kvstore")


def run(arguments: Sequence[str]) -> Report:
    """Start a mesh, measure each level of load both ways, stop it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks path", description=DESCRIPTION)
    parser.add_argument("--requests", type=int, default=400, help="requests at each level (default 400)")
    parser.add_argument("--streams", default="1,16,64", help="levels of concurrent streams (default 1,16,64)")
    options = parser.parse_args(arguments)
    levels = [int(level) for level in options.streams.split(",")]
    with tempfile.TemporaryDirectory(prefix="rh-path-") as folder:
        catalogue = _write_catalogue(Path(folder))
        return asyncio.run(_measure(catalogue, levels, options.requests))


def _write_catalogue(root: Path) -> Path:
    model = knob_model(root / MODEL, tokens=TOKENS)
    declaration = {
        "version": 1,
        "tenants": [{"name": TENANT}],
        "models": [
            {
                "name": MODEL,
                "source": {"path": str(model)},
                "engine": "triton",
                "interface": "llm",
                "slots": SLOTS,
                "context_tokens": 4096,
                "memory": {"device": "16MiB", "kv_pool_tokens": 1_000_000},
                "price": {"id": "bench", "output": "1"},
            }
        ],
    }
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump(declaration, sort_keys=False))
    return path


async def _measure(catalogue: Path, levels: Sequence[int], requests: int) -> Report:
    options = ClusterOptions(nodes=1, http_port=0, grpc_port=0, admin_port=0, cluster="bench", log_level="warning")
    figures: dict[str, Figure] = {"tokens_per_request": TOKENS}
    limits: dict[str, Figure] = {}
    goals: list[Goal] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with benchmark_mesh(options, catalogue) as mesh, aiohttp.ClientSession(connector=connector) as session:
        through = MeshClient(session, mesh.http_url, mesh.keys[TENANT], MODEL, TOKENS)
        warm = await closed_loop(through.stream, callers=4, requests=20)  # loads the model; not measured
        direct = await _direct_client(mesh)
        try:
            await closed_loop(direct.stream, callers=4, requests=20)
            for level in levels:
                straight, load, cpu = await _in_turns(mesh, direct, through, level, requests)
                _add_level(figures, limits, level, load, straight, cpu)
                if level == 1:
                    _add_first_token_goals(goals, load, straight)
        finally:
            await direct.close()
        await _add_ledger(figures, goals, mesh, len(warm.streams) + requests * len(levels))
    return Report(NAME, figures, limits, goals)


async def _in_turns(
    mesh: BenchmarkMesh, direct: TritonClient, through: MeshClient, level: int, requests: int
) -> tuple[Load, Load, Mapping[str, float]]:
    """Both ways in turns, so that what else the machine does meets both alike; and the mesh's CPU by part."""
    straight, load, cpu = Load(0.0), Load(0.0), dict[str, float]()
    for turn in range(TURNS):
        share = requests * (turn + 1) // TURNS - requests * turn // TURNS
        straight = straight.plus(await closed_loop(direct.stream, callers=level, requests=share))
        used, part = await _with_cpu(mesh, through, level, share)
        load = load.plus(part)
        cpu = {name: cpu.get(name, 0.0) + seconds * share / requests for name, seconds in used.items()}
    return straight, load, cpu


def _add_first_token_goals(goals: list[Goal], mesh: Load, direct: Load) -> None:
    """Of one caller on a model that is loaded: what all of us adds to Triton's own first token, and no stall."""
    added = mesh.first_token_ms(0.5) - direct.first_token_ms(0.5)
    goals.append(Goal.at_most("first token of one caller later than Triton's, p50, ms", FIRST_TOKEN_MS, added))
    whole = mesh.total_ms(0.5) - direct.total_ms(0.5)
    goals.append(Goal.at_most("last token of one caller later than Triton's, p50, ms: no stall", STALL_MS, whole))


async def _direct_client(mesh: BenchmarkMesh) -> TritonClient:
    (node,) = await mesh.admin.nodes()
    (instance,) = [found for found in node["instances"] if found["state"] == "ready"]
    request = EngineRequest(
        request_id=RequestId("bench"),
        text_input="hello there",
        prompt_token_ids=(),
        sampling_parameters=f'{{"max_tokens": {TOKENS}, "temperature": 0}}',
        phase="full",
        stream=True,
        salt="00" * 32,
        adapter_path="",
        adapter_digest="",
    )
    name = instance["triton_model_name"]
    return TritonClient(node["triton_grpc_address"], name, generate_message(name, request))


async def _with_cpu(
    mesh: BenchmarkMesh, client: MeshClient, level: int, requests: int
) -> tuple[Mapping[str, float], Load]:
    """CPU seconds per 1,000 requests by part, the client's own included, and the load."""
    groups = mesh.process_groups
    before, own = cpu_seconds_by_group(groups), time.process_time()
    load = await closed_loop(client.stream, callers=level, requests=requests)
    after = cpu_seconds_by_group(groups)
    used: dict[str, float] = {"client": time.process_time() - own}
    for name in groups:
        part = name.split("-")[0]
        used[part] = used.get(part, 0.0) + after[name] - before[name]
    return {part: seconds * 1000 / requests for part, seconds in used.items()}, load


def _add_level(
    figures: dict[str, Figure],
    limits: dict[str, Figure],
    level: int,
    mesh: Load,
    direct: Load,
    cpu: Mapping[str, float],
) -> None:
    at = f"at_{level}"
    figures[f"mesh_requests_per_second_{at}"] = mesh.per_second
    limits[f"direct_requests_per_second_{at}"] = direct.per_second
    figures[f"mesh_to_direct_rate_{at}"] = mesh.per_second / direct.per_second
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        figures[f"added_first_token_ms_{label}_{at}"] = mesh.first_token_ms(share) - direct.first_token_ms(share)
        figures[f"added_total_ms_{label}_{at}"] = mesh.total_ms(share) - direct.total_ms(share)
        limits[f"direct_total_ms_{label}_{at}"] = direct.total_ms(share)
    for part in ("client", *PARTS_ON_THE_PATH):
        figures[f"cpu_s_per_1000_{part}_{at}"] = cpu.get(part, 0.0)
    figures[f"cpu_s_per_1000_mesh_{at}"] = sum(
        seconds for part, seconds in cpu.items() if part not in ("client", "triton")
    )


async def _add_ledger(figures: dict[str, Figure], goals: list[Goal], mesh: BenchmarkMesh, requests: int) -> None:
    """Where the time of the last requests went, and whether every token is in the bill."""
    totals = await _settled_totals(mesh, requests)
    rows = await mesh.admin.usage(group_by="request", limit="200")
    for name in ("queue_ms", "first_token_ms", "run_ms", "total_ms"):
        figures[f"ledger_mean_{name}_last_{len(rows)}"] = fmean(row[name] for row in rows)
    goals.append(Goal("requests in the ledger", f"= {requests}", totals["requests"], totals["requests"] == requests))
    tokens = requests * TOKENS
    goals.append(Goal("tokens billed", f"= {tokens}", totals["output_tokens"], totals["output_tokens"] == tokens))


async def _settled_totals(mesh: BenchmarkMesh, requests: int) -> dict[str, Any]:
    """The tenant's totals, once the ledger has all requests; after 20 s whatever it has."""
    totals: dict[str, Any] = {"requests": 0, "output_tokens": 0}
    ends = time.monotonic() + 20
    while totals["requests"] < requests and time.monotonic() < ends:
        totals = next(iter(await mesh.admin.usage(group_by="tenant")), totals)
        await asyncio.sleep(0.2)  # a poll: the query API has no events
    return totals
