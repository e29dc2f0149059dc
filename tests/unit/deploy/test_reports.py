"""What a starting cluster tells, on a terminal and through a pipe."""

import io
import os
import shlex
from pathlib import Path

import msgspec
from rich.console import Console

from deploy.local.news import audit_line
from deploy.local.supervisor import PartEvent, Phase
from roundhouse.cli.cluster_report import (
    PipeReport,
    ReportLine,
    Summary,
    TerminalReport,
    curl_line,
    show_reports,
)
from roundhouse.cli.demo_tour import percentile
from roundhouse.wire.v1 import events_pb2

SUMMARY = Summary(
    http_url="http://127.0.0.1:8080",
    grpc_address="127.0.0.1:8081",
    admin_url="http://127.0.0.1:8082",
    home="/home/me/.roundhouse",
    tenant_keys={"acme": "rh-key-of-acme"},
    sample_model="base-s",
    models=405,
    elapsed_s=5.24,
)


def shown(write: list[ReportLine]) -> tuple[int, str]:
    """What the command prints for reports that came through a pipe, and its exit code."""
    readable, writable = os.pipe()
    report = PipeReport(writable)
    for line in write:
        report.send(line)
    report.close()
    page = io.StringIO()
    code = show_reports(readable, TerminalReport(Console(file=page, width=200)), Path("/tmp/cluster.log"))  # noqa: S108
    return code, page.getvalue()


def test_a_detached_cluster_that_gets_ready_is_shown_and_ends_with_0() -> None:
    """Parts, steps, then address and key, as in the foreground."""
    lines = [
        ReportLine(part="nats", phase=Phase.STARTING),
        ReportLine(part="nats", phase=Phase.SERVING),
        ReportLine(step="catalogue", done=1, total=1),
        ReportLine(ready=SUMMARY),
    ]
    code, page = shown(lines)
    assert code == 0
    assert "nats serves" in page
    assert "catalogue: done" in page
    assert "up in 5.2 s with 405 models" in page
    assert "rh-key-of-acme" in page
    assert "Out of service" not in page


def test_nodes_that_were_drained_are_told_with_the_command_that_brings_them_back() -> None:
    """A drain outlives the mesh; who starts it again would look for the reason why nothing is served."""
    drained = msgspec.structs.replace(SUMMARY, out_of_service={"node-2": "in maintenance: new fan"})
    _, page = shown([ReportLine(ready=drained)])
    assert "roundhouse nodes resume NODE" in page
    assert "node-2" in page
    assert "in maintenance: new fan" in page


def test_a_problem_of_a_detached_cluster_is_told_and_ends_with_1() -> None:
    """The words of the cluster, not a traceback."""
    assert shown([ReportLine(problem="port 8080 is taken")]) == (1, "port 8080 is taken\n")


def test_a_detached_cluster_that_dies_silently_names_its_log() -> None:
    """The pipe ends without "ready": exit code 1 and where to look."""
    code, page = shown([ReportLine(part="nats", phase=Phase.STARTING)])
    assert code == 1
    assert "/tmp/cluster.log" in page  # noqa: S108


def test_the_first_request_is_one_line_that_a_shell_takes() -> None:
    """The copied line has the address, the key, and a body that is JSON."""
    words = shlex.split(curl_line(SUMMARY))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8080/v1/chat/completions"]
    assert "Authorization: Bearer rh-key-of-acme" in words
    body = msgspec.json.decode(words[-1])
    assert (body["model"], body["stream"]) == ("base-s", True)


def test_without_a_terminal_a_crash_is_one_plain_line() -> None:
    """Logs of a detached cluster have no control characters."""
    page = io.StringIO()
    report = TerminalReport(Console(file=page, width=200))
    report.part(PartEvent("gateway", Phase.CRASHED, "ended with code 3; starting it again in 0.5 s"))
    assert page.getvalue() == "gateway ended with code 3; starting it again in 0.5 s\n"


def test_an_audit_event_becomes_one_line_with_its_reasons() -> None:
    """What, subject, node, reason and details; digests are for machines."""
    event = events_pb2.AuditEvent(what="load", subject="atlas-7", reason="demand")
    event.details.update({"node": "node-1", "load_ms": "213", "digest": "sha256:00"})
    assert audit_line(event) == "load atlas-7 on node-1 (demand, load_ms=213)"


def test_percentiles_are_nearest_ranks() -> None:
    """Of 1 to 20: half of them are at most 10; the 99th percentile is the 20th value, because 0.99 × 20 = 19.8."""
    values = [float(value) for value in range(1, 21)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values[:1], 99)) == (10.0, 20.0, 1.0)
