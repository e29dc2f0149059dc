"""A mesh for a benchmark: the embedded cluster on free ports with a given catalogue, gone when the context is left."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local.admin_client import AdminClient
from deploy.local.cluster import RunningCluster, running_cluster
from deploy.local.home import Home
from deploy.local.parts import ClusterOptions


@dataclass(frozen=True, slots=True)
class BenchmarkMesh:
    """What a load generator needs."""

    cluster: RunningCluster
    admin: AdminClient
    keys: dict[str, str]  # tenant → key

    @property
    def http_url(self) -> str:
        """Where clients call."""
        return self.cluster.plan.http_url

    @property
    def process_groups(self) -> dict[str, int]:
        """Part → process group id."""
        return {state.name: state.pid for state in self.cluster.supervisor.states()}


@asynccontextmanager
async def benchmark_mesh(options: ClusterOptions, catalogue: Path) -> AsyncIterator[BenchmarkMesh]:
    """Start a mesh in a temporary folder, apply `catalogue`, make a key for each tenant. Raises ClusterProblem."""
    with tempfile.TemporaryDirectory(prefix="rh-bench-") as folder:
        async with running_cluster(Home(Path(folder)), options, lambda _event: None) as cluster:
            admin = AdminClient(cluster.plan.admin_url, cluster.secrets.admin_key)
            try:
                await admin.apply(catalogue)
                tenants = (await admin.catalogue())["tenants"]
                keys = {tenant: await admin.create_key(tenant) for tenant in tenants}
                await cluster.wait_ready()
                yield BenchmarkMesh(cluster, admin, keys)
            finally:
                await admin.close()
