"""`roundhouse demo` and `roundhouse demo-models`: see the mesh work, and make models to try it with."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from deploy.local.bootstrap import bootstrap
from deploy.local.cluster import running_cluster
from deploy.local.home import ClusterProblem, Home
from deploy.local.parts import ClusterOptions
from roundhouse.cli.cluster_report import TerminalReport
from roundhouse.cli.demo_tour import Tour
from roundhouse.environment import roundhouse_home

console = Console(highlight=False)


def demo_models(
    folder: Annotated[Path, typer.Argument(help="Where to write models, adapters and catalogue.yaml.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other weights.")] = 0,
) -> None:
    """Write the demo catalogue: 205 small models and 200 adapters of 40 tenants, about 400 MB."""
    from engines.demo_models import write_demo_models

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("writing models", total=None)
        made = write_demo_models(
            folder.absolute(), seed, lambda done, total, _: bar.update(task, completed=done, total=total)
        )
    typer.echo(f"{made.path}: {len(made.models)} models, {len(made.adapters)} adapters, {len(made.tenants)} tenants")


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's folder with its logs.")] = False,
) -> None:
    """A tour on a fresh mesh: cold and warm answers, an adapter, a loud and a quiet tenant, a refusal, the bill."""
    root = Path(tempfile.mkdtemp(prefix="roundhouse-demo-"))
    try:
        asyncio.run(_demo(Home(root)))
    except ClusterProblem as problem:
        typer.echo(f"{problem}\nlogs: {root / 'logs'}", err=True)
        keep = True
        raise typer.Exit(1) from problem
    finally:
        if keep:
            typer.echo(f"kept {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


async def _demo(home: Home) -> None:
    """Start, tour, stop. Models that `roundhouse up` has written are used as they are."""
    written = roundhouse_home() / "data" / "models" / "catalogue.yaml"
    report = TerminalReport(console)
    report.open()
    try:
        options = ClusterOptions(http_port=0, grpc_port=0, admin_port=0, cluster="demo")
        async with running_cluster(home, options, report.part, report.note) as cluster:
            admin = await bootstrap(cluster, written if written.exists() else None, report.step)
            try:
                await cluster.wait_ready()
                report.close()
                await Tour(cluster, admin, console).run()
            finally:
                await admin.close()
    finally:
        report.close()
