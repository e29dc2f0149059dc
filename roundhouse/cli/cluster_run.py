"""Running the embedded cluster in this process until it is told to stop."""

import asyncio
import signal
import time
from pathlib import Path

from deploy.local.admin_client import AdminClient, visible_models
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
    running = asyncio.current_task()
    assert running is not None, "this is a coroutine"
    ending = _Ending(running, report)
    ending.listen()
    try:
        async with running_cluster(home, options, report.part, report.note) as cluster:
            report.ready(await _make_ready(cluster, catalogue, report, started))
            await _tell_news(cluster, report)
    except asyncio.CancelledError:
        if not ending.asked:
            raise
        running.uncancel()  # the signal is the reason, and everything has been stopped


class _Ending:
    """The first signal ends the work by cancelling it, which drains and stops; the next one cancels the draining."""

    def __init__(self, work: asyncio.Task[object], report: Report) -> None:
        self._work = work
        self._report = report
        self.asked = False

    def listen(self) -> None:
        """Take SIGINT, SIGTERM, and the terminal's end unless `nohup` has it ignored."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self.asked:
            self._report.note("draining; once more to stop at once")
        self.asked = True
        self._work.cancel()


async def _make_ready(cluster: RunningCluster, catalogue: Path | None, report: Report, started: float) -> Summary:
    admin = await bootstrap(cluster, catalogue, report.step)
    try:
        await cluster.wait_ready()
        return await _summary(cluster, admin, started)
    finally:
        await admin.close()


async def _summary(cluster: RunningCluster, admin: AdminClient, started: float) -> Summary:
    catalogue = await admin.catalogue()
    key = next(iter(cluster.secrets.tenant_keys.values()), None)
    visible = await visible_models(cluster.plan.http_url, key) if key is not None else None
    language = [name for name in visible or () if catalogue["models"].get(name, {}).get("interface") == "llm"]
    return Summary(
        http_url=cluster.plan.http_url,
        grpc_address=f"127.0.0.1:{cluster.plan.grpc_port}",
        admin_url=cluster.plan.admin_url,
        home=str(cluster.home.root),
        tenant_keys=cluster.secrets.tenant_keys,
        sample_model=min(language, default=""),
        models=len(catalogue["models"]) + len(catalogue["adapters"]),
        elapsed_s=time.monotonic() - started,
        out_of_service={
            node["node_id"]: node["unhealthy_reason"] for node in await admin.nodes() if not node["accepting"]
        },
    )


async def _tell_news(cluster: RunningCluster, report: Report) -> None:
    """Tell what happens, until cancelled."""
    bus = await NatsBus.connect(cluster.plan.nats_url, name="roundhouse-up")
    news = News(bus, lambda line: report.note(stamped(line)))
    await news.start()
    try:
        await asyncio.Event().wait()
    finally:
        await news.stop()
        await bus.close()
