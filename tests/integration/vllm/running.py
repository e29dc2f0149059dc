"""Runs a script of this folder in vLLM's own environment, `.venv-vllm`, and what its tests ask for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roundhouse.block_keys import tenant_salt

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("ROUNDHOUSE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
ONE, TWO = (tenant_salt("cluster", name).hex() for name in ("one", "two"))
PROMPT = [5 + (7 * place) % 250 for place in range(150)]  # 4 whole blocks of 32 and 22 tokens
LONGER = [*PROMPT[:70], *range(20, 90)]  # shares 2 whole blocks with it
LIMIT_S = 600.0  # two processes that import torch take five minutes of a machine with ten times as much to do
MARKS = [
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM has no environment here: make test-vllm makes it"),
    pytest.mark.timeout(2 * LIMIT_S),
]

Answers = list[list[tuple[list[int], int]]]


def run_inside(script: str, asked: dict[str, Any]) -> Answers:
    """Tokens and cached tokens of each request of each round. Raises AssertionError with the end of vLLM's log."""
    done = subprocess.run(
        [str(PYTHON), "-m", f"tests.integration.vllm.{script}"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-4_000:]
    return [[(tokens, cached) for tokens, cached in each] for each in json.loads(lines[-1][6:])]
