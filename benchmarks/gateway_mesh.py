"""A mesh whose only node is a fake: all that stands before the engines is real; what engines cost is left out."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.mesh import BenchmarkMesh
from deploy.local.admin_client import AdminClient
from deploy.local.child import Command
from deploy.local.cluster import running_cluster
from deploy.local.home import Home
from deploy.local.parts import ClusterOptions
from deploy.local.ports import free_ports
from deploy.local.probes import listening_probe
from deploy.local.server import LocalServer, Program
from tests.builders.checkpoints import knob_model

TENANT = "bench"
FAST, HOLD = "fast", "hold"
NARROW = "hold-narrow"  # one request at a time
SLOTS = 20_000  # never full: queueing is not what is measured


@dataclass(frozen=True, slots=True)
class GatewayMesh:
    """What a load generator needs."""

    mesh: BenchmarkMesh
    node: LocalServer
    digests: Mapping[str, str]

    @property
    def http_port(self) -> int:
        """Where clients call."""
        return self.mesh.cluster.plan.http_port

    @property
    def process_groups(self) -> dict[str, int]:
        """Part → process group id, the fake node's included."""
        assert self.node.child is not None
        return {**self.mesh.process_groups, "node": self.node.child.pid}


def python_program(name: str, module: str, arguments: list[str], port: int, log: Path) -> Program:
    """`python -m MODULE ARGUMENTS` as a program that serves on `port`."""
    command = Command([sys.executable, "-m", module, *arguments], log, {"PYTHONUNBUFFERED": "1"})
    return Program(name, command, partial(listening_probe, port), port)


@asynccontextmanager
async def gateway_mesh(
    *,
    tenants: list[dict[str, Any]] | None = None,
    models: tuple[str, ...] = (FAST, HOLD),
    log_level: str = "warning",
    key_limits: Mapping[str, dict[str, Any]] | None = None,
) -> AsyncIterator[GatewayMesh]:
    """Start NATS, Valkey, metering, scheduler, gateway and the fake node; stop all at the end.

    `key_limits`: of each tenant's key, beside the tenant's own."""
    limits = key_limits or {}
    options = ClusterOptions(nodes=0, http_port=0, grpc_port=0, admin_port=0, cluster="bench", log_level=log_level)
    with tempfile.TemporaryDirectory(prefix="rh-bench-") as name:
        folder = Path(name)
        catalogue = _write_catalogue(folder, tenants or [{"name": TENANT}], models)
        async with running_cluster(Home(folder / "home"), options, lambda _event: None) as cluster:
            admin = AdminClient(cluster.plan.admin_url, cluster.secrets.admin_key)
            try:
                await admin.apply(catalogue)
                applied = await admin.catalogue()
                keys = {tenant: await admin.create_key(tenant, limits.get(tenant)) for tenant in applied["tenants"]}
                digests = {model: str(record["digest"]) for model, record in applied["models"].items()}
                (port,) = free_ports(1)
                node = _fake_node(folder, cluster.plan.nats_url, port, digests)
                await asyncio.to_thread(_wait_started, node)
                try:
                    await cluster.wait_ready()
                    yield GatewayMesh(BenchmarkMesh(cluster, admin, keys), node, digests)
                finally:
                    await asyncio.to_thread(node.stop)
            finally:
                await admin.close()


def _fake_node(folder: Path, nats_url: str, port: int, digests: Mapping[str, str]) -> LocalServer:
    options = folder / "node.json"
    options.write_text(
        json.dumps({"nats_url": nats_url, "port": port, "models": dict(digests), "slots": SLOTS, "narrow": [NARROW]})
    )
    node = LocalServer(python_program("node", "benchmarks.fake_node", [str(options)], port, folder / "node.log"))
    node.spawn()  # in the main thread: the kernel ties a child to the thread that forked it
    return node


def _wait_started(server: LocalServer) -> None:
    server.wait_ready()


def _write_catalogue(root: Path, tenants: list[dict[str, Any]], models: tuple[str, ...]) -> Path:
    declaration = {
        "version": 1,
        "tenants": tenants,
        "models": [
            {
                "name": model,
                "source": {"path": str(knob_model(root / model))},
                "engine": "triton",
                "interface": "llm",
                "slots": 1 if model == NARROW else 1024,  # the most that a catalogue may say; the node itself says more
                "context_tokens": 4096,
                "memory": {"device": "16MiB", "kv_pool_tokens": 1_000_000},
                "price": {"id": "bench", "output": "1"},
            }
            for model in models
        ],
    }
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump(declaration, sort_keys=False))
    return path
