"""Running the embedded cluster in this process until it is told to stop."""

import asyncio
import signal
import time
from pathlib import Path

from deploy.local.admin_client import AdminClient
from deploy.local.bootstrap import bootstrap
from deploy.local.cluster import RunningCluster, running_cluster
from deploy.local.home import Home
from deploy.local.news import News, stamped
from deploy.local.parts import ClusterOptions
from roundhouse.cli.cluster_report import Report, Summary
from roundhouse.event_bus import NatsBus


async def run_cluster(home: Home, options: ClusterOptions, catalogue: Path | None, report: Report) -> None:
    """Start, report, and run until SIGINT or SIGTERM; then drain and stop. A second signal kills at once.

    Raises ClusterProblem if it cannot start; nothing runs then."""
    started = time.monotonic()
    ending = _Ending()
    ending.listen()
    async with running_cluster(home, options, report.part, report.note) as cluster:
        starting = asyncio.create_task(_make_ready(cluster, catalogue, report, started))
        ended = asyncio.create_task(ending.asked.wait())
        await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            report.ready(starting.result())
            await _tell_news(cluster, report, ending)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        ended.cancel()
        report.note("draining; once more to stop at once")
        ending.supervised(cluster)


class _Ending:
    """The first signal asks for an end, the second forces it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._cluster: RunningCluster | None = None

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def supervised(self, cluster: RunningCluster) -> None:
        self._cluster = cluster

    def _on_signal(self) -> None:
        if self._cluster is not None:
            self._cluster.supervisor.kill_now()
        self.asked.set()


async def _make_ready(cluster: RunningCluster, catalogue: Path | None, report: Report, started: float) -> Summary:
    admin = await bootstrap(cluster, catalogue, report.step)
    try:
        await cluster.wait_ready()
        return await _summary(cluster, admin, started)
    finally:
        await admin.close()


async def _summary(cluster: RunningCluster, admin: AdminClient, started: float) -> Summary:
    catalogue = await admin.catalogue()
    language = [name for name, model in catalogue["models"].items() if model["interface"] == "llm"]
    return Summary(
        http_url=cluster.plan.http_url,
        grpc_address=f"127.0.0.1:{cluster.plan.grpc_port}",
        admin_url=cluster.plan.admin_url,
        home=str(cluster.home.root),
        tenant_keys=cluster.secrets.tenant_keys,
        sample_model=min(language, default=""),
        models=len(catalogue["models"]) + len(catalogue["adapters"]),
        elapsed_s=time.monotonic() - started,
    )


async def _tell_news(cluster: RunningCluster, report: Report, ending: _Ending) -> None:
    bus = await NatsBus.connect(cluster.plan.nats_url, name="roundhouse-up")
    news = News(bus, lambda line: report.note(stamped(line)))
    await news.start()
    try:
        await ending.asked.wait()
    finally:
        await news.stop()
        await bus.close()
