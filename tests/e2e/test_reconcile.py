"""The books of a real mesh: after requests of every kind of end they agree, engines included."""

import asyncio
import time
from typing import Any

import pytest

from tests.e2e.calls import admin_get, ledger_rows, nothing, opened, streamed
from tests.e2e.mesh import Mesh

pytestmark = pytest.mark.timeout(120)


def test_the_books_of_a_mesh_agree(mesh: Mesh) -> None:
    """Finished, cancelled and refused requests: no difference by request, and the engine counted what was billed."""
    since_ms = round(time.time() * 1000)
    admin_get(mesh, "/metering/differences")  # the engines' counters are sampled from here on, if not before
    ended = [streamed(mesh, "tiny-1", "globex", max_tokens=9, act=nothing) for _ in range(3)]
    with opened(mesh, "story", "globex", max_tokens=200) as (left, events):
        for _ in zip(range(5), events, strict=False):
            pass
    rows = ledger_rows(mesh, "globex", {stream.request_id for stream in (*ended, left)}, within_s=30)
    assert sum(rows[stream.request_id]["output_tokens"] for stream in ended) == 27
    found = asyncio.run(_agreed(mesh, since_ms))
    assert found["differences"] == []
    assert found["checked"]["settled"] >= 4
    counted = {line["model"]: line["engine_tokens"] for line in found["engines"]}
    assert counted["tiny-1"][1] >= 27


async def _agreed(mesh: Mesh, since_ms: int) -> dict[str, Any]:
    """What the reconciler says, once everything is in all books, or after a while."""
    deadline = time.monotonic() + 30
    while True:
        window = {"from": str(since_ms), "to": str(round(time.time() * 1000))}
        found = admin_get(mesh, "/metering/differences", **window)
        sampled = any(line["model"] == "tiny-1" and line["engine_tokens"][1] >= 27 for line in found["engines"])
        agreed = sampled and not found["differences"] and found["checked"].get("settled", 0) >= 4
        if agreed or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)
