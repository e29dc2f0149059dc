"""What the reference engine counts on Triton's metrics page, next to what its callers were told."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from engines.packaging import EngineSpec
from services.metering.adapters.engine_metrics import parse_counters
from tests.builders.checkpoints import random_checkpoint
from tests.infra import TritonServer
from tests.integration.engines.engine_server import EngineServer


def counted(triton: TritonServer) -> dict[str, tuple[int, int]]:
    """Prompt and output tokens by model."""
    page = httpx.get(f"http://127.0.0.1:{triton.ports.metrics}/metrics", timeout=5).text
    return {model: (one.input_tokens, one.output_tokens) for model, one in parse_counters(page).items()}


def test_the_engine_counts_what_its_callers_were_told(
    triton: TritonServer, engines: EngineServer, tmp_path: Path
) -> None:
    """Two models on one server: 3 answers of 5 tokens to 11 prompt tokens are 33 and 15; the other has 2 and 7."""
    for name in ("one", "two"):
        path = random_checkpoint(tmp_path / name, 1)
        engines.load(EngineSpec("reference", name, str(path), slots=2, kv_pool_tokens=1024))
    for stream in (True, False, True):
        assert engines.ask("one", "Hello world", temperature=0, max_tokens=5, stream=stream).output_tokens == 5
    assert engines.ask("two", "Hi", temperature=0, max_tokens=7).output_tokens == 7
    wanted = {"one": (33, 15), "two": (2, 7)}
    deadline = time.monotonic() + 30
    while counted(triton) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counted(triton) == wanted
    for name in ("one", "two"):
        engines.unload(name)
