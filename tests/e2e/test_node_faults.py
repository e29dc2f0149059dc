"""What callers and the bill see when an engine, a node or a limit's holder goes away in the middle of work."""

import signal
import time
from collections.abc import Callable

import httpx
import pytest

from tests.e2e.calls import ledger_rows, nothing, opened, streamed
from tests.e2e.mesh import Mesh

pytestmark = pytest.mark.timeout(300)

LIMIT_LEASE_S = 30  # case B10: a killed gateway's concurrency slots come back by themselves within this time


@pytest.mark.parametrize("part", ["metering", "loader-1", "loader-2", "kvstore-1"])
def test_a_running_stream_outlives_what_it_does_not_need(mesh: Mesh, part: str) -> None:
    """Invariant 18: with a part away from the third event on, all 60 tokens still come; they are on the bill later."""
    stream = streamed(mesh, "story", max_tokens=60, act=lambda: mesh.kill(part))
    mesh.restart(part)
    mesh.wait_ready()
    assert (stream.done, stream.errors, stream.finish_reasons) == (True, [], ["length"])
    assert stream.completion_tokens == 60
    row = ledger_rows(mesh, "acme", {stream.request_id}, within_s=30)[stream.request_id]
    assert (row["output_tokens"], row["outcome"]) == (60, "done")


def test_an_engine_that_dies_in_a_stream_is_told_as_an_error(mesh: Mesh) -> None:
    """Case B29: one error event, no finish reason, no `[DONE]`; the 3 tokens that came are on the bill, as failed."""
    stream = streamed(mesh, "dies", act=nothing)
    assert (len(stream.errors), stream.finish_reasons, stream.done) == (1, [], False)
    row = ledger_rows(mesh, "acme", {stream.request_id})[stream.request_id]
    assert (row["outcome"], row["output_tokens"]) == ("failed", 3)
    # Triton keeps the model of a dead engine process "ready"; only a restart clears it for the tests that follow.
    mesh.crash(row["node"].replace("node", "triton"))
    mesh.wait_ready()


def test_a_killed_triton_is_told_and_comes_back(mesh: Mesh) -> None:
    """Case B29: SIGKILL of the node's Triton in a stream gives one error event; after its restart the model answers."""
    node = _node_of(mesh, "story")
    stream = streamed(mesh, "story", max_tokens=100, act=lambda: mesh.crash(node.replace("node", "triton")))
    assert (len(stream.errors), stream.finish_reasons, stream.done) == (1, [], False)
    mesh.wait_ready()
    again = streamed(mesh, "story", max_tokens=8, act=nothing)
    assert (again.completion_tokens, again.done) == (8, True)


def test_a_stopped_triton_is_found_out_and_found_back(mesh: Mesh) -> None:
    """Case B48: SIGSTOP turns the loader's readiness false within 10 s while it stays live; SIGCONT brings it back."""
    triton = mesh.process("triton-1")
    triton.send_signal(signal.SIGSTOP)
    try:
        assert _within(10, lambda: mesh.why_not_ready("loader-1") is not None)
        assert httpx.get(f"{mesh.ops_url('loader-1')}/health/live", timeout=5).status_code == 200
        assert streamed(mesh, "tiny-4", max_tokens=4, act=nothing).done, "the other node serves"
    finally:
        triton.send_signal(signal.SIGCONT)
    assert _within(10, lambda: mesh.why_not_ready("loader-1") is None)


def test_slots_of_a_killed_gateway_come_back_without_help(mesh: Mesh) -> None:
    """Case B10: a tenant with 2 concurrent requests loses its gateway in both; within the lease it may call again.

    The bill has both attempts from the last heartbeat: abandoned, with the tokens of at least the first 10 events."""
    streamed(mesh, "story", max_tokens=2, act=nothing)  # warm
    with (
        opened(mesh, "story", "tight", max_tokens=200) as (first, first_events),
        opened(mesh, "story", "tight", max_tokens=200) as (second, second_events),
    ):
        for events in (first_events, second_events):
            for _ in range(10):
                next(events)
        time.sleep(2.5)  # two heartbeats, one a second
        mesh.crash("gateway")
    killed = time.monotonic()
    mesh.wait_ready()
    assert _within(LIMIT_LEASE_S + 5 - (time.monotonic() - killed), lambda: _may_call(mesh, "tight"))
    rows = ledger_rows(mesh, "tight", {first.request_id, second.request_id}, within_s=30)
    assert {row["outcome"] for row in rows.values()} == {"abandoned"}
    assert all(row["output_tokens"] >= 10 for row in rows.values())


def _may_call(mesh: Mesh, tenant: str) -> bool:
    """Whether one request is admitted now. Refused ones cost nothing, so asking often uses up no limit."""
    try:
        return streamed(mesh, "story", tenant, max_tokens=1, act=nothing).done
    except (AssertionError, httpx.HTTPError):
        return False


def _node_of(mesh: Mesh, model: str) -> str:
    """The node that the model is loaded on; loads it by calling it."""
    request = streamed(mesh, model, max_tokens=1, act=nothing).request_id
    return str(ledger_rows(mesh, "acme", {request})[request]["node"])


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.5)
    return False
