"""The containers as a user sees them: up, real streamed requests from outside, the bill, and down with nothing left.

Run by `make compose-test`; needs a container engine. It uses a project name and ports of its own, so that a mesh
started with `make compose-up` is not touched.
"""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from deploy.local.ports import free_ports

HERE = Path(__file__).resolve().parent
ADMIN_KEY = "rh-admin-development-only-key"
READY_WITHIN_S = 180.0
LEDGER_WITHIN_S = 20.0
MODELS = ("base-s", "base-xs", "acme-code-3", "acme-lora-1", "base-s")  # the last one is warm


@dataclass(frozen=True, slots=True)
class Containers:
    """The running project."""

    compose: tuple[str, ...]
    environment: dict[str, str]
    http_url: str
    admin_url: str

    def run(self, *arguments: str) -> str:
        """One compose command; returns its stdout and fails the test with its stderr."""
        done = subprocess.run(
            [*self.compose, *arguments], env=self.environment, check=False, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr[-2000:]}"
        return done.stdout

    def admin(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """One call of the admin API from outside."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.request(method, f"{self.admin_url}/admin/v1{path}", headers=headers, timeout=120, **options)
        assert answer.is_success, answer.text
        body: dict[str, Any] = answer.json()
        return body


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    """The mesh in containers, taken down with its volumes at the end; its logs are shown if something failed."""
    subprocess.run([str(HERE / "build-image.sh")], check=True, timeout=900)
    http, grpc, admin = free_ports(3)
    environment = {
        **os.environ,
        "ROUNDHOUSE_HTTP_PORT": str(http),
        "ROUNDHOUSE_GRPC_PORT": str(grpc),
        "ROUNDHOUSE_ADMIN_PORT": str(admin),
    }
    project = f"roundhouse-test-{uuid.uuid4().hex[:6]}"
    compose = (*_compose(), "-p", project, "-f", str(HERE / "docker-compose.yml"))
    running = Containers(compose, environment, f"http://127.0.0.1:{http}", f"http://127.0.0.1:{admin}")
    try:
        running.run("up", "-d")
        _wait_until_ready(running)
        yield running
    finally:
        subprocess.run([*compose, "logs", "--tail=30", "--no-color"], env=environment, check=False, timeout=60)
        subprocess.run([*compose, "down", "-v", "--timeout", "15"], env=environment, check=True, timeout=300)
        left = subprocess.run(
            ["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={project}"],  # noqa: S607
            check=True,
            capture_output=True,
        )
        assert left.stdout == b"", "no container is left"


def _compose() -> tuple[str, ...]:
    """`docker compose` where there is the plugin, else the older `docker-compose`."""
    if subprocess.run(["docker", "compose", "version"], check=False, capture_output=True).returncode == 0:  # noqa: S607
        return ("docker", "compose")
    assert shutil.which("docker-compose"), "neither `docker compose` nor `docker-compose` is installed"
    return ("docker-compose",)


def _wait_until_ready(running: Containers) -> None:
    """Both nodes take work. The gateway is ready only after the first catalogue, so the admin API is asked."""
    deadline = time.monotonic() + READY_WITHIN_S
    reason = ""
    while time.monotonic() < deadline:
        try:
            nodes = running.admin("GET", "/nodes")["nodes"]
            if sum(1 for node in nodes if node["accepting"]) == 2:
                return
            reason = str(nodes)
        except (httpx.HTTPError, AssertionError) as error:
            reason = str(error)
        time.sleep(0.5)  # between two looks at the containers
    raise TimeoutError(f"the mesh is not ready after {READY_WITHIN_S:.0f} s: {reason}\n{running.run('ps')}")


@pytest.mark.timeout(900)
def test_what_is_streamed_is_billed(containers: Containers) -> None:
    """Requests from outside, cold, warm and with an adapter: tokens in their usage = on the bill (invariant 13)."""
    containers.run("run", "--rm", "roundhouse", "demo-models", "/models/demo")
    containers.run("run", "--rm", "roundhouse", "apply", "-f", "/models/demo/catalogue.yaml")
    key = containers.admin("POST", "/keys", json={"tenant": "acme"})["key"]
    client = OpenAI(base_url=f"{containers.http_url}/v1", api_key=key, timeout=120)
    streamed = [_stream(client, model) for model in MODELS]
    assert all(tokens > 0 for _, tokens in streamed)
    billed = _billed(containers, requests=len(MODELS))
    assert billed == (sum(prompt for prompt, _ in streamed), sum(output for _, output in streamed))


def _stream(client: OpenAI, model: str) -> tuple[int, int]:
    """Stream a chat answer; its prompt and completion tokens as the API said."""
    usage = None
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me about railways."}],
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        usage = chunk.usage or usage
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens


def _billed(containers: Containers, requests: int) -> tuple[int, int]:
    """Input and output tokens on the bill of acme, once all its requests are there."""
    deadline = time.monotonic() + LEDGER_WITHIN_S
    rows: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        rows = containers.admin("GET", "/usage", params={"tenant": "acme", "group_by": "tenant"})["rows"]
        if rows and rows[0]["requests"] >= requests:
            assert rows[0]["requests"] == requests
            return rows[0]["input_tokens"], rows[0]["output_tokens"]
        time.sleep(0.2)  # between two looks at the ledger
    raise TimeoutError(f"the bill is not complete after {LEDGER_WITHIN_S:.0f} s: {rows}")
