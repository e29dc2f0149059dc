"""Brings a served cluster to its first use: a catalogue and one key for each demo tenant.

Everything goes through the admin API, as an operator would do it. Idempotent: a catalogue that is there and keys that
are kept stay as they are.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from deploy.local.admin_client import AdminClient, visible_models
from deploy.local.cluster import RunningCluster
from deploy.local.home import Home

DEMO_TENANTS = ("acme", "globex")

Step = Callable[[str, int, int], None]


async def bootstrap(cluster: RunningCluster, catalogue: Path | None, step: Step) -> AdminClient:
    """Apply `catalogue` (None: the demo catalogue, if none was applied before) and make the demo keys.

    Returns the admin client, to be closed by the caller. Raises ClusterProblem with what the admin API said."""
    admin = AdminClient(cluster.plan.admin_url, cluster.secrets.admin_key)
    try:
        declaration = catalogue
        if declaration is None and (await admin.catalogue())["generation"] == 0:
            declaration = await demo_catalogue(cluster.home, step)
        if declaration is not None:
            step("catalogue", 0, 1)
            await admin.apply(declaration)
            step("catalogue", 1, 1)
        await _keep_keys(cluster, admin, step)
    except BaseException:
        await admin.close()
        raise
    return admin


async def demo_catalogue(home: Home, step: Step) -> Path:
    """The demo catalogue's file, generated with its models on first use."""
    declaration = home.models / "catalogue.yaml"
    if not declaration.exists():  # it is written last, so it stands for all models
        from engines.demo_models import write_demo_models

        def progress(done: int, total: int, _: str) -> None:
            step("demo models", done, total)

        await asyncio.to_thread(write_demo_models, home.models, progress=progress)
    return declaration


async def _keep_keys(cluster: RunningCluster, admin: AdminClient, step: Step) -> None:
    """One working key for each demo tenant. Kept ones that the data folder no longer knows are made anew."""
    tenants = [name for name in DEMO_TENANTS if name in (await admin.catalogue())["tenants"]]
    for number, tenant in enumerate(tenants, start=1):
        kept = cluster.secrets.tenant_keys.get(tenant)
        if kept is None or await visible_models(cluster.plan.http_url, kept) is None:
            cluster.secrets.tenant_keys[tenant] = await admin.create_key(tenant)
            cluster.home.write_secrets(cluster.secrets)
        step("keys", number, len(tenants))
