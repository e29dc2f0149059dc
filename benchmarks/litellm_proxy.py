"""LiteLLM's proxy as a process, for comparison. No dependency: give the path of its program in a venv of its own."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import yaml

from deploy.local.child import Command
from deploy.local.ports import free_ports
from deploy.local.probes import http_probe
from deploy.local.server import LocalServer, Program

START_S = 120.0  # it imports for half a minute on two busy cores


@asynccontextmanager
async def litellm_proxy(
    program: Path, upstream_port: int, model: str, folder: Path
) -> AsyncIterator[tuple[int, int, str]]:
    """Start it with one worker, no database, and one model behind it; yields port, process group and key."""
    (port,) = free_ports(1)
    key = f"sk-{secrets.token_hex(8)}"
    behind = {
        "model": f"openai/{model}",
        "api_base": f"http://127.0.0.1:{upstream_port}/v1",
        "api_key": "none",
    }
    config = folder / "litellm.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model_list": [{"model_name": model, "litellm_params": behind}],
                "general_settings": {"master_key": key},
                "litellm_settings": {"telemetry": False, "num_retries": 0},
            }
        )
    )
    arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    command = Command([str(program), *arguments], folder / "litellm.log", environment)
    probe = partial(http_probe, port, "/health/liveliness")
    server = LocalServer(Program("litellm", command, probe, port, ready_within_s=START_S))
    child = server.spawn()
    try:
        await asyncio.to_thread(server.wait_ready)
        yield port, child.pid, key
    finally:
        await asyncio.to_thread(server.stop)
