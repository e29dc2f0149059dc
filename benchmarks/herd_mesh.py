"""The herd on a real mesh: requests for one cold model at once, through the gateway of an embedded cluster.

Not a benchmark by itself. The ideal needs the real load time, which is what the answers say of it.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from benchmarks.mesh import benchmark_mesh
from deploy.local.parts import ClusterOptions
from tests.builders.checkpoints import knob_model

MODEL = "cold"
TENANT_COUNT = 10
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Herd:
    """What became of the requests: total time of each in ms, refusals, loads, and what the load itself took."""

    took_ms: list[int]
    refused: int
    loads: int
    load_ms: int


def stampede(requests: int, slots: int, run_ms: int, load_ms: int) -> Herd:
    """Start a mesh, send all requests at once, stop it. Raises ClusterProblem."""
    with tempfile.TemporaryDirectory(prefix="rh-herd-") as folder:
        return asyncio.run(_stampede(_catalogue(Path(folder), slots, run_ms, load_ms), requests))


def _catalogue(root: Path, slots: int, run_ms: int, load_ms: int) -> Path:
    model = knob_model(root / MODEL, tokens=1, request_ms=run_ms, load_ms=load_ms)
    declaration = {
        "version": 1,
        "tenants": [{"name": f"t{n}", "limits": {"queued_requests": 10_000}} for n in range(TENANT_COUNT)],
        "models": [
            {
                "name": MODEL,
                "source": {"path": str(model)},
                "engine": "triton",
                "interface": "llm",
                "slots": slots,
                "context_tokens": 4096,
                "memory": {"device": "16MiB", "kv_pool_tokens": 1_000_000},
                "slo": {
                    "time_to_first_token_ms": 600_000,
                    "cold_start_ms": 600_000,
                },  # one instance is what is measured
            }
        ],
    }
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump(declaration, sort_keys=False))
    return path


async def _stampede(catalogue: Path, requests: int) -> Herd:
    options = ClusterOptions(nodes=1, http_port=0, grpc_port=0, admin_port=0, cluster="bench", log_level="warning")
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        benchmark_mesh(options, catalogue) as mesh,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
    ):
        keys = sorted(mesh.keys.items())

        async def send(number: int) -> tuple[int, int, int]:
            headers = {"Authorization": f"Bearer {keys[number % len(keys)][1]}", "Content-Type": "application/json"}
            body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "temperature": 0})
            began = time.perf_counter()
            async with session.post(f"{mesh.http_url}/v1/completions", data=body, headers=headers) as response:
                await response.read()
                loaded = sum(int(response.headers.get(f"x-roundhouse-{name}-ms", 0)) for name in ("stage", "load"))
                return response.status, round((time.perf_counter() - began) * 1000), loaded

        answers = await asyncio.gather(*(send(number) for number in range(requests)))
        ready = [each for node in await mesh.admin.nodes() for each in node["instances"] if each["state"] == "ready"]
        done = [took for status, took, _ in answers if status == 200]
        return Herd(done, len(answers) - len(done), len(ready), max(loaded for _, _, loaded in answers))
