"""Calls that end-to-end tests make: streams with their events, and the ledger's rows."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.mesh import Mesh


@dataclass(slots=True)
class Stream:
    """One streamed chat answer as it came over the wire."""

    request_id: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False  # `[DONE]` came
    broken: str = ""  # the connection ended in another way

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Events with a top-level error."""
        return [event["error"] for event in self.events if "error" in event]

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons that were told."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]

    @property
    def completion_tokens(self) -> int | None:
        """What the usage chunk says; None if it did not come."""
        usages = [event["usage"] for event in self.events if event.get("usage")]
        return int(usages[-1]["completion_tokens"]) if usages else None

    @property
    def text(self) -> str:
        """Joined deltas."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return "".join(choice.get("delta", {}).get("content") or "" for choice in choices)


@contextmanager
def opened(
    mesh: Mesh, model: str, tenant: str = "acme", *, max_tokens: int = 32, body: dict[str, Any] | None = None
) -> Iterator[tuple[Stream, Any]]:
    """An open stream and an iterator that fills it event by event. Raises AssertionError unless the status is 200.

    `body` adds to the request, or replaces what is in it."""
    whole = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "hello"}],
        **(body or {}),
    }
    headers = {"Authorization": f"Bearer {mesh.keys[tenant]}"}
    with httpx.stream(
        "POST", f"{mesh.http_url}/v1/chat/completions", json=whole, headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        stream = Stream(response.headers["x-request-id"])
        yield stream, _events(response, stream)


def _events(response: httpx.Response, stream: Stream) -> Iterator[dict[str, Any]]:
    try:
        for line in _lines(response):
            if line == "data: [DONE]":
                stream.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                stream.events.append(event)
                yield event
    except httpx.HTTPError as error:
        stream.broken = f"{type(error).__name__}: {error}"


def _lines(response: httpx.Response) -> Iterator[str]:
    """Lines of an event stream, which end with a newline only: httpx's own also end at U+0085 and U+2028, which random
    models say."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def streamed(
    mesh: Mesh,
    model: str,
    tenant: str = "acme",
    *,
    max_tokens: int = 32,
    after: int = 3,
    act: Callable[[], None],
    body: dict[str, Any] | None = None,
) -> Stream:
    """Stream an answer; call `act` once when `after` events have come."""
    with opened(mesh, model, tenant, max_tokens=max_tokens, body=body) as (stream, events):
        for count, _ in enumerate(events, start=1):
            if count == after:
                act()
    return stream


def nothing() -> None:
    """For streams that nothing happens to."""


def admin_get(mesh: Mesh, path: str, **parameters: str) -> dict[str, Any]:
    """One read of the admin API."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    answer = httpx.get(f"{mesh.admin_url}/admin/v1{path}", params=parameters, headers=headers, timeout=60)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ledger_rows(
    mesh: Mesh, tenant: str, wanted: set[str], *, within_s: float = 60.0, since_ms: int = 0
) -> dict[str, dict[str, Any]]:
    """Ledger rows by request id, once all of `wanted` are there. Raises TimeoutError naming the missing ones.

    Only the first 500 rows since `since_ms` (Unix time) are looked at."""
    deadline = time.monotonic() + within_s
    found: dict[str, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        try:
            rows = admin_get(mesh, "/usage", tenant=tenant, group_by="request", limit="500", **{"from": str(since_ms)})[
                "rows"
            ]
        except (httpx.HTTPError, AssertionError):
            rows = []  # the gateway or metering is coming back
        found = {row["request_id"]: row for row in rows}
        if wanted <= found.keys():
            return {request: found[request] for request in wanted}
        time.sleep(0.1)
    raise TimeoutError(f"not in the ledger after {within_s:.0f} s: {sorted(wanted - found.keys())}")
