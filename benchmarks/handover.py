"""What decode waits for after the first token of a handed-over prompt: its blocks fetched afterwards, or as they are
computed. Part of `python -m benchmarks disaggregation`.

Two real kvstores and two reference engines on this machine. A prompt of 1,500 tokens runs on one engine; then decode is
asked on the other, and two times are taken from the prompt's first token on: until decode has every block leased in its
own node's memory, and until its first token, which also copies them into the engine, as for any hit in memory. A block
of 16 tokens is 256 KiB, so a prompt moves 23 MiB. Both nodes share this machine's cores and no network lies between
them: a real one makes what is fetched afterwards slower, and what came meanwhile no slower.
"""

import json
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, Goal
from benchmarks.streams import quantile
from engines.reference.intake import CallInputs, accept_call, await_prefix
from engines.reference.kvstore_client import KvStoreClient
from engines.reference.loaded_model import LoadedModel
from engines.reference.paged_kv import BLOCK_TOKENS
from engines.reference.sequence import TokenGenerated
from roundhouse.block_keys import prefix_block_keys, tenant_salt
from roundhouse.wire.v1 import kv_pb2
from tests.builders.checkpoints import random_checkpoint
from tests.integration.kvstore.kvstore_process import KvStoreProcess
from tests.unit.engines.engine_driver import open_model

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "layers": 16,
    "heads": 8,
    "kv_heads": 8,
    "context_tokens": 2048,
}
PROMPT, PROMPTS = 1_500, 3
SALT, DIGEST = tenant_salt("bench", "one"), "ab" * 32
SAMPLING = json.dumps({"temperature": 0, "max_tokens": 2, "ignore_eos": True})
HALF = 0.5  # goal: at least half of the wait is gone


class _Pair:
    """A node for prompts and one that decodes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        weights = random_checkpoint(folder / "weights", 1, **SHAPE)
        self.stores: list[KvStoreProcess] = []
        self.engines: list[LoadedModel] = []
        for name in ("prefill", "decode"):
            (folder / name).mkdir()
            store = KvStoreProcess(folder / name, node_id=name, arena_bytes=256 << 20, slot_bytes=256 << 10)
            stack.enter_context(closing(store))
            store.start()
            engine = open_model(weights, kvstore_address=store.address, model_digest=DIGEST)
            stack.callback(engine.store.close)
            assert isinstance(engine.store, KvStoreClient)
            assert engine.store.wait_until_mapped(30)
            self.stores.append(store)
            self.engines.append(engine)

    def gaps_ms(self, number: int, meanwhile: bool) -> tuple[float, float]:
        """From the first token: until the blocks are there, and until the next token, on the other node."""
        prompt = [5 + (number * 17 + place * 7 + place // 250) % 240 for place in range(PROMPT)]
        handle, peer = f"r{number}/1", self.stores[0].address
        keys = prefix_block_keys(SALT, bytes.fromhex(DIGEST), b"", BLOCK_TOKENS, prompt)
        bring = kv_pb2.BringPrefixRequest(salt=SALT, keys=keys, peers=[peer], hold=handle, wait_ms=8_000)
        bringing = self.stores[1].stub.BringPrefix.future(bring, timeout=30) if meanwhile else None
        first, _ = self._token(self.engines[0], prompt, phase="prefill")
        ended = time.perf_counter()
        details = {"phase": "decode", "resumed_token_ids": [first], "kv_peers": [peer], "kv_hold": handle}
        _, there = self._token(self.engines[1], prompt, **details)
        whole = time.perf_counter()
        if bringing is not None:
            bringing.result()
        return (there - ended) * 1000, (whole - ended) * 1000

    def _token(self, engine: LoadedModel, prompt: list[int], **details: object) -> tuple[int, float]:
        """The first token, and when everything that could be found had been found."""
        what = json.dumps({"salt": SALT.hex(), "prompt_token_ids": prompt, **details})
        call = accept_call(engine, CallInputs("", SAMPLING, what))
        if call.awaits_more:
            call = await_prefix(engine, call)
        there = time.perf_counter()
        engine.engine.submit(call.request, 0.0)
        found: list[int] = []
        while engine.engine.has_work:
            found += [event.token_id for event in engine.engine.step() if isinstance(event, TokenGenerated)]
        return found[0], there


def handed_over(figures: dict[str, Figure], goals: list[Goal]) -> None:
    """Both ways in turns, so that what else runs here meets them alike."""
    with tempfile.TemporaryDirectory(prefix="rh-handover-") as folder, ExitStack() as stack:
        pair = _Pair(Path(folder), stack)
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(2 * PROMPTS + 2):
            gaps = pair.gaps_ms(number, bool(number % 2))
            if number >= 2:  # the first of each touches everything for the first time
                found[bool(number % 2)].append(gaps)
    medians: dict[bool, float] = {}
    for meanwhile, label in ((False, "fetched_after"), (True, "brought_meanwhile")):
        medians[meanwhile] = quantile([there for there, _ in found[meanwhile]], 0.5)
        figures[f"handover_{label}_blocks_there_p50_ms"] = round(medians[meanwhile], 1)
        figures[f"handover_{label}_next_token_p50_ms"] = round(
            quantile([next_ for _, next_ in found[meanwhile]], 0.5), 1
        )
    what = "hand-over: wait for the blocks after the first token, brought meanwhile / fetched after"
    goals.append(Goal.at_most(what, HALF, medians[True] / medians[False]))
