"""The commands that start, stop and show the embedded cluster."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.local.home import ClusterProblem, Home
from deploy.local.overrides import Override, parse_override
from deploy.local.parts import ClusterOptions, Profile
from deploy.local.sizes import parse_bytes, show_bytes
from roundhouse.cli.cluster_end import end_cluster
from roundhouse.cli.cluster_report import PipeReport, Report, ReportLine, TerminalReport, show_reports
from roundhouse.cli.cluster_run import run_cluster
from roundhouse.cli.cluster_status import show_status
from roundhouse.environment import roundhouse_home

console = Console(highlight=False)
DEFAULTS = ClusterOptions()

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the cluster's data, logs and keys [default: .roundhouse].")
]


def open_home(data_dir: Path | None) -> Home:
    """The folder that was chosen, else ROUNDHOUSE_HOME, else `.roundhouse` here."""
    return Home(data_dir.absolute() if data_dir is not None else roundhouse_home())


def give_up(problem: str) -> typer.Exit:
    """Tell a problem on stderr; raise the result to exit with code 1."""
    typer.echo(problem, err=True)
    return typer.Exit(1)


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")] = False,
    catalogue: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Catalogue to apply [default: the demo's].")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=8, help="Nodes: a Triton, a loader and a kvstore each.")] = 2,
    device_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that models may take on a node.")
    ] = show_bytes(DEFAULTS.device_bytes),
    profile: Annotated[
        Profile, typer.Option(help="mixed: nodes run requests whole; disaggregated: half run prompts, half decode.")
    ] = Profile.MIXED,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP API; 0 = any.")] = 8080,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gRPC API; 0 = any.")] = 8081,
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the admin API; 0 = any.")] = 8082,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SERVICE.NAME=VALUE", help="A setting of a service, such as metering.log_level=debug."
        ),
    ] = None,
    data_dir: DataDir = None,
    report_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start the whole mesh on this machine: NATS, Valkey, Triton nodes and all services."""
    options = ClusterOptions(
        nodes=nodes,
        device_bytes=_size(device_bytes),
        http_port=http_port,
        grpc_port=grpc_port,
        admin_port=admin_port,
        profile=profile,
        overrides=_overrides(settings or []),
    )
    if profile is Profile.DISAGGREGATED and nodes < 2:
        raise give_up("the disaggregated profile needs two nodes or more: one for prompts, one that decodes")
    home = open_home(data_dir)
    if detach:
        raise typer.Exit(_up_detached(home))
    terminal = TerminalReport(console)
    report: Report = terminal if report_fd < 0 else PipeReport(report_fd)
    if report_fd < 0:
        terminal.open()
    try:
        asyncio.run(run_cluster(home, options, catalogue, report))
    except ClusterProblem as problem:
        terminal.close()
        if isinstance(report, PipeReport):
            report.send(ReportLine(problem=str(problem)))
        raise give_up(str(problem)) from problem
    finally:
        terminal.close()
    report.note("stopped")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device-bytes") from error


def _overrides(texts: list[str]) -> tuple[Override, ...]:
    try:
        return tuple(parse_override(text) for text in texts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error


def _up_detached(home: Home) -> int:
    """Start the same command in a session of its own, without --detach, and show its reports."""
    options = [option for option in sys.argv[2:] if option not in ("--detach", "-d")]
    log = home.log("cluster")
    log.parent.mkdir(parents=True, exist_ok=True)
    readable, writable = os.pipe()
    argv = [sys.executable, "-m", "roundhouse.cli.app", "up", *options, "--report-fd", str(writable)]
    with log.open("ab") as output:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[writable], start_new_session=True
        )
    os.close(writable)
    terminal = TerminalReport(console)
    terminal.open()
    return show_reports(readable, terminal, log)


def down(data_dir: DataDir = None) -> None:
    """Stop the cluster: drain, stop every part, leave nothing running."""
    try:
        typer.echo(end_cluster(open_home(data_dir)))
    except ClusterProblem as problem:
        raise give_up(str(problem)) from problem


def status(data_dir: DataDir = None) -> None:
    """Show the parts of the cluster and what is loaded on its nodes. Exits 1 if it is not ready, 3 if not running."""
    raise typer.Exit(asyncio.run(show_status(open_home(data_dir), console)))


def logs(
    name: Annotated[str, typer.Argument(help="Part, such as gateway or loader-1; `roundhouse status` lists them.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on showing new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to begin with.")] = 50,
    data_dir: DataDir = None,
) -> None:
    """Show the log of one part."""
    log = open_home(data_dir).log(name)
    if not log.exists():
        known = ", ".join(sorted(path.stem for path in log.parent.glob("*.log")))
        raise give_up(f"no log of {name!r} in {log.parent}" + (f"; there are {known}" if known else ""))
    argv = ["tail", "-n", str(lines), *(["-F"] if follow else []), str(log)]
    os.execvp("tail", argv)  # noqa: S606, S607 - coreutils, from PATH as a person would call it


def bench(context: typer.Context) -> None:
    """Run benchmarks: `roundhouse bench NAME [--json FILE]`; all options go to `python -m benchmarks`."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "benchmarks", *context.args]))
