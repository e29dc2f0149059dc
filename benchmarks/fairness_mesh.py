"""The fairness scenario on a real mesh: the same arrivals, sent open loop to the gateway of an embedded cluster.

NATS, Valkey and Triton are real; the model takes 10 ms a request, one request at a time. With `ahead` its instance has
one slot more than it runs: the next request waits in the engine while the end of the last one travels to the scheduler
and a grant travels back. What is measured is the client's time less the 10 ms: queue, engine and everything between.
Not a benchmark by itself.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from benchmarks.mesh import BenchmarkMesh, benchmark_mesh
from benchmarks.processes import cpu_seconds_by_group
from benchmarks.simulation_worker import Arrival
from deploy.local.overrides import Override
from deploy.local.parts import ClusterOptions
from tests.builders.checkpoints import knob_model

MODEL = "worker"
WARM_REQUESTS = 30  # connections, tokenizer, the average run time of the model
RAMP_S = 0.5  # between the warm-up and the first arrival


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as its client saw it."""

    tenant: str
    status: int
    queue_ms: int  # as the gateway says: submit to grant
    total_ms: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it. `cpu_s` by part of the mesh, over `span_s`."""

    answered: list[Answered]
    cpu_s: dict[str, float]
    span_s: float


def replay(arrivals: Sequence[Arrival], run_ms: int, ahead: int, credit: int) -> Replayed:
    """Start a mesh, send the arrivals at their times, stop it. Raises ClusterProblem."""
    with tempfile.TemporaryDirectory(prefix="rh-fairness-") as folder:
        tenants = sorted({each.tenant for each in arrivals})
        return asyncio.run(_replay(_catalogue(Path(folder), tenants, run_ms, 1 + ahead), arrivals, credit))


def _catalogue(root: Path, tenants: Sequence[str], run_ms: int, slots: int) -> Path:
    model = knob_model(root / MODEL, tokens=1, request_ms=run_ms, one_at_a_time=True)
    declaration = {
        "version": 1,
        "tenants": [{"name": name, "limits": {"queued_requests": 10_000}} for name in tenants],
        "models": [
            {
                "name": MODEL,
                "source": {"path": str(model)},
                "engine": "triton",
                "interface": "llm",
                "slots": slots,
                "context_tokens": 4096,
                "memory": {"device": "16MiB", "kv_pool_tokens": 1_000_000},
            }
        ],
    }
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump(declaration, sort_keys=False))
    return path


async def _replay(catalogue: Path, arrivals: Sequence[Arrival], credit: int) -> Replayed:
    options = ClusterOptions(
        nodes=1,
        http_port=0,
        grpc_port=0,
        admin_port=0,
        cluster="bench",
        log_level="warning",
        overrides=(Override("scheduler", "BURST_CREDIT_REQUESTS", str(credit)),),
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with benchmark_mesh(options, catalogue) as mesh, aiohttp.ClientSession(connector=connector) as session:
        for each in arrivals[:WARM_REQUESTS]:
            await _send(mesh, session, each.tenant)
        before = cpu_seconds_by_group(mesh.process_groups)
        begin = time.perf_counter() + RAMP_S
        answered = list(await asyncio.gather(*(_at(begin, mesh, session, each) for each in arrivals)))
        span_s = time.perf_counter() - begin
        after = cpu_seconds_by_group(mesh.process_groups)
        return Replayed(answered, {part: after[part] - before[part] for part in after}, span_s)


async def _at(begin: float, mesh: BenchmarkMesh, session: aiohttp.ClientSession, arrival: Arrival) -> Answered:
    await asyncio.sleep(max(0.0, begin + arrival.at_ms / 1000 - time.perf_counter()))
    return await _send(mesh, session, arrival.tenant)


async def _send(mesh: BenchmarkMesh, session: aiohttp.ClientSession, tenant: str) -> Answered:
    headers = {"Authorization": f"Bearer {mesh.keys[tenant]}", "Content-Type": "application/json"}
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": 0})
    began = time.perf_counter()
    async with session.post(f"{mesh.http_url}/v1/completions", data=body, headers=headers) as response:
        await response.read()
        waited = int(response.headers.get("x-roundhouse-queue-ms", 0))
        return Answered(tenant, response.status, waited, (time.perf_counter() - began) * 1000)
