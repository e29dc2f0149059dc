"""Time to the first token of a prompt of 2,000 tokens: computed, and with blocks of memory, a disk and another node.

The reference engine itself, in this process, with two real kvstore processes; no Triton and no gateway, whose time is
the same in all cases. A random Llama of 8 layers (hidden 256, 4 KV heads of 32) makes blocks of 128 KiB: 125 of them,
16 MB. Not a benchmark: it has no `NAME`.
"""

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from benchmarks.kv_process import kvstore_running
from benchmarks.report import Figure
from engines.reference.intake import CallInputs, accept_call, await_prefix
from engines.reference.kvstore_client import KvStoreClient
from engines.reference.loaded_model import LoadedModel, load_model
from engines.reference.sequence import TokenGenerated
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc
from tests.builders.checkpoints import random_checkpoint

TOKENS, TURNS = 2_000, 5
CACHED = (TOKENS - 1) // 16 * 16
ARENA_BYTES = 256 << 20
SALT = "5a" * 32


@dataclass(frozen=True, slots=True)
class First:
    """How long the first token took, and how many tokens of the prompt were not computed."""

    ms: float
    cached: int


def first_token_figures(folder: Path) -> dict[str, Figure]:
    """Medians in ms, and their ratios to the computed one; turns that did not find every block are left out."""
    weights = random_checkpoint(
        folder / "weights",
        1,
        layers=8,
        hidden_size=256,
        intermediate_size=512,
        heads=8,
        kv_heads=4,
        context_tokens=2_048,
    )
    with ExitStack() as stack:
        near, restart = stack.enter_context(kvstore_running(folder, ARENA_BYTES))
        far, _ = stack.enter_context(kvstore_running(folder, ARENA_BYTES))
        engines = [_opened(weights, address) for address in (near, far)]
        for engine in engines:
            stack.callback(engine.store.close)
        here, there = engines
        prompts = [_prompt(turn) for turn in range(2 * TURNS)]
        cold = [_first(here, prompt) for prompt in prompts[:TURNS]]
        memory = [_first(here, prompt) for prompt in prompts[:TURNS]]
        for prompt in prompts[TURNS:]:
            _first(there, prompt)
        peer = [_first(here, prompt, peers=[far]) for prompt in prompts[TURNS:]]
        _wait_until_on_disk(near, TURNS * CACHED // 16)
        restart()
        _find_again(here)
        disk = [_first(here, prompt) for prompt in prompts[:TURNS]]
    cases = {"cold": (cold, 0), "memory": (memory, CACHED), "disk": (disk, CACHED), "peer": (peer, CACHED)}
    medians = {name: _median(turns, cached) for name, (turns, cached) in cases.items()}
    figures: dict[str, Figure] = {f"first_token_{name}_ms": ms for name, ms in medians.items()}
    for name in ("memory", "disk", "peer"):
        figures[f"first_token_{name}_of_cold"] = medians[name] / medians["cold"]
    return figures


def _opened(weights: Path, address: str) -> LoadedModel:
    engine = load_model(
        {
            "weights_path": str(weights),
            "slots": "1",
            "kv_pool_tokens": "4096",
            "kvstore_address": address,
            "model_digest": "ab" * 32,
        }
    )
    assert isinstance(engine.store, KvStoreClient)
    assert engine.store.wait_until_mapped(30)
    return engine


def _first(engine: LoadedModel, prompt: list[int], peers: list[str] | None = None) -> First:
    """One call up to its first token; then what is new is stored."""
    details = json.dumps({"salt": SALT, "prompt_token_ids": prompt, "kv_peers": peers or []})
    started = time.perf_counter()
    call = accept_call(engine, CallInputs("", json.dumps({"temperature": 0, "max_tokens": 1}), details))
    if call.awaits_more:
        call = await_prefix(engine, call)
    engine.engine.submit(call.request, time.monotonic())
    token = _until(lambda: [event for event in engine.engine.step() if isinstance(event, TokenGenerated)])
    took = First(1_000 * (time.perf_counter() - started), token[0].cached_tokens)
    assert engine.store.flush(30)
    return took


def _until(events: Callable[[], list[TokenGenerated]]) -> list[TokenGenerated]:
    found = events()
    while not found:
        found = events()
    return found


def _wait_until_on_disk(address: str, blocks: int) -> None:
    """What was used is written in the background, and first what was used first. Raises TimeoutError."""
    ends = time.monotonic() + 60
    with grpc.insecure_channel(address) as channel:
        stub = kv_pb2_grpc.KvStoreStub(channel)
        while stub.GetStatistics(kv_pb2.GetStatisticsRequest()).disk.blocks < blocks:
            if time.monotonic() > ends:
                raise TimeoutError("what was used is not on the disk after a minute")
            time.sleep(0.05)  # between two looks at another process


def _find_again(engine: LoadedModel) -> None:
    """The engine maps the arena of the new process, noticed by calls of somebody else."""
    assert isinstance(engine.store, KvStoreClient)
    before = engine.store.statistics().stored
    for number in range(100):
        _first(engine, [number, *range(5, 40)])
        if engine.store.statistics().stored > before:
            return
        time.sleep(0.05)  # after a failure the client asks nobody for a moment


def _prompt(turn: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(turn).integers(5, 255, TOKENS)]


def _median(turns: list[First], cached: int) -> float:
    whole = [turn.ms for turn in turns if turn.cached == cached]
    return statistics.median(whole) if whole else float("nan")
