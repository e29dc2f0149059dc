"""How a starting cluster tells its progress: on this terminal, or through a pipe to the command that started it.

`up --detach` runs the cluster in a process of its own, which writes one JSON line a report into a pipe; the command
reads them and shows the same display as in the foreground.
"""

import os
import time
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.local.supervisor import PartEvent, Phase


class Summary(msgspec.Struct, kw_only=True):
    """What a person needs to use the cluster. Holds keys: shown once, never logged."""

    http_url: str
    grpc_address: str
    admin_url: str
    home: str
    tenant_keys: dict[str, str]
    sample_model: str  # one that the first tenant may call; empty = the catalogue has no language model
    models: int
    elapsed_s: float
    out_of_service: dict[str, str] = {}  # nodes that take no work, and why: a drain outlives restarts


class ReportLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One report on the pipe; one of the fields is set."""

    part: str = ""
    phase: Phase = Phase.STARTING
    detail: str = ""
    step: str = ""
    done: int = 0
    total: int = 0
    note: str = ""
    problem: str = ""
    ready: Summary | None = None


class Report(Protocol):
    """Where a starting and running cluster tells what happens."""

    def part(self, event: PartEvent) -> None:
        """A part changed."""

    def step(self, name: str, done: int, total: int) -> None:
        """Work other than starting parts moved on; it is done when `done == total`."""

    def note(self, text: str) -> None:
        """One line for the person."""

    def ready(self, summary: Summary) -> None:
        """Everything works."""


class PipeReport:
    """Reports as JSON lines into a file descriptor, until ready; afterwards notes go to stdout, which is the log."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def send(self, line: ReportLine) -> None:
        """Write one line; nobody reading any more is no error."""
        if not self._file.closed:
            try:
                self._file.write(msgspec.json.encode(line) + b"\n")
            except BrokenPipeError:
                self.close()

    def part(self, event: PartEvent) -> None:
        """A part changed."""
        self.send(ReportLine(part=event.part, phase=event.phase, detail=event.detail))

    def step(self, name: str, done: int, total: int) -> None:
        """Work moved on."""
        self.send(ReportLine(step=name, done=done, total=total))

    def note(self, text: str) -> None:
        """One line."""
        self.send(ReportLine(note=text))
        os.write(1, f"{text}\n".encode())

    def ready(self, summary: Summary) -> None:
        """Everything works; the reader leaves."""
        self.send(ReportLine(ready=summary))
        self.close()

    def close(self) -> None:
        """Let the reader see the end. Idempotent."""
        self._file.close()


class TerminalReport:
    """A live list of parts while the cluster starts, then plain lines. Without a terminal: plain lines only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, tuple[Phase, str, float, float | None]] = {}
        self._steps: dict[str, tuple[int, int, float, float | None]] = {}
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10, transient=False)
        self._showing = False

    def open(self) -> None:
        """Begin the live list."""
        if self._console.is_terminal:
            self._live.start()
            self._showing = True

    def close(self) -> None:
        """End the live list, leaving its last state on the screen. Idempotent."""
        if self._showing:
            self._live.stop()
            self._showing = False

    def part(self, event: PartEvent) -> None:
        """A part changed."""
        now = time.monotonic()
        since = self._rows[event.part][2] if event.part in self._rows else now
        ended = now if event.phase is Phase.SERVING else None
        self._rows[event.part] = (event.phase, event.detail, since, ended)
        if not self._showing and event.phase in (Phase.CRASHED, Phase.HUNG, Phase.FAILED):
            self.note(f"{event.part} {event.detail}")
        elif not self._showing and event.phase is Phase.SERVING:
            self.note(f"{event.part} serves ({now - since:.1f} s)")

    def step(self, name: str, done: int, total: int) -> None:
        """Work moved on."""
        now = time.monotonic()
        since = self._steps[name][2] if name in self._steps else now
        self._steps[name] = (done, total, since, now if done >= total else None)
        if not self._showing and done >= total:
            self.note(f"{name}: done ({now - since:.1f} s)")

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(Text(text))

    def ready(self, summary: Summary) -> None:
        """Everything works: end the list and say how to use it."""
        self.close()
        print_summary(self._console, summary)

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, (phase, detail, since, ended) in self._rows.items():
            mark = Text("✓", "green") if phase is Phase.SERVING else self._spinner
            table.add_row(mark, name, Text(detail or phase.value, "dim"), _elapsed(since, ended))
        for name, (done, total, since, ended) in self._steps.items():
            mark = Text("✓", "green") if ended else self._spinner
            table.add_row(mark, name, Text(f"{done}/{total}" if total > 1 else "", "dim"), _elapsed(since, ended))
        return Group(table)


def _elapsed(since: float, ended: float | None) -> Text:
    return Text(f"{(ended or time.monotonic()) - since:5.1f} s", "dim")


def print_summary(console: Console, summary: Summary) -> None:
    """Addresses, keys and a first request to copy."""
    console.print()
    console.print(
        f"[bold green]Roundhouse is up[/] in {summary.elapsed_s:.1f} s with {summary.models} models", highlight=False
    )
    rows = [
        ("HTTP (OpenAI, KServe v2)", summary.http_url),
        ("gRPC (KServe v2)", summary.grpc_address),
        ("admin API", summary.admin_url),
        ("data, logs, admin key", summary.home),
        *((f"key of {tenant}", key) for tenant, key in summary.tenant_keys.items()),
    ]
    for label, value in rows:
        console.print(Text(f"  {label:<26} {value}"), soft_wrap=True)
    if summary.out_of_service:
        console.print("\nOut of service (`roundhouse nodes resume NODE` brings a drained node back):\n")
        for node, reason in summary.out_of_service.items():
            console.print(Text(f"  {node:<26} {reason}"), soft_wrap=True)
    if summary.sample_model and summary.tenant_keys:
        console.print("\nA first request:\n")
        console.print(Text(curl_line(summary)), soft_wrap=True)
    console.print()


def curl_line(summary: Summary) -> str:
    """A streamed chat request for a shell."""
    key = next(iter(summary.tenant_keys.values()))
    body = (
        f'{{"model": "{summary.sample_model}", "stream": true, "max_tokens": 48,'
        f' "messages": [{{"role": "user", "content": "Tell me about railways."}}]}}'
    )
    return (
        f"curl -N {summary.http_url}/v1/chat/completions"
        f" -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{body}'"
    )


def show_reports(descriptor: int, report: TerminalReport, log: Path) -> int:
    """Show the reports of a detached cluster until it is ready (0) or gives up (1)."""
    with os.fdopen(descriptor, "rb") as lines:
        for raw in lines:
            line = msgspec.json.decode(raw, type=ReportLine)
            if line.ready is not None:
                report.ready(line.ready)
                return 0
            if line.problem:
                report.close()
                report.note(line.problem)
                return 1
            _show(line, report)
    report.close()
    report.note(f"the cluster ended while it started; its log is {log}")
    return 1


def _show(line: ReportLine, report: TerminalReport) -> None:
    if line.part:
        report.part(PartEvent(line.part, line.phase, line.detail))
    elif line.step:
        report.step(line.step, line.done, line.total)
    elif line.note:
        report.note(line.note)
