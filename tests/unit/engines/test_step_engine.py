"""Admission, cancellation, faults, stops and reuse of KV blocks, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.checkpoint_writer import safetensors_bytes
from engines.reference.checkpoint import read_safetensors
from engines.reference.kv_cache import BlockArray, BlockSpace, CachedPrefix
from engines.reference.loaded_model import LoadedModel
from engines.reference.paged_kv import BLOCK_TOKENS
from engines.reference.sampling_params import InvalidRequest
from engines.reference.sequence import ContextLengthExceeded, Embedded, GenerationRequest, TokenGenerated
from tests.builders.checkpoints import random_adapter, random_checkpoint, scripted_checkpoint
from tests.unit.engines.engine_driver import make_request, open_model, run_one, run_requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a context of 512 tokens."""
    return random_checkpoint(tmp_path_factory.mktemp("engine") / "model", 1)


@pytest.mark.parametrize("one_byte", [True, False])
def test_a_scripted_model_says_its_text_and_ends(tmp_path: Path, one_byte: bool) -> None:
    """Case B31: one byte a token, whatever the prompt: the whole text, then the end token, which has no text."""
    text = "ď🌍你" if one_byte else "ALPHA abracadabra"
    model = open_model(scripted_checkpoint(tmp_path / "m", text, one_byte_per_token=one_byte))
    for prompt in ("hello", "你", text, "a longer prompt with many words"):
        outcome = run_one(model, prompt, max_tokens=40)
        assert (outcome.text, outcome.finish) == (text, "stop")


def test_stop_strings_and_cut_ends(tmp_path: Path) -> None:
    """Case B31: a stop string of three tokens is found and not sent; a cut inside a character is one U+FFFD."""
    model = open_model(scripted_checkpoint(tmp_path / "m", "ď🌍你"))
    stopped = run_one(model, "x", stop=["你"])
    assert (stopped.text, stopped.finish, len(stopped.token_ids)) == ("ď🌍", "stop", 9)
    cut = run_one(model, "x", max_tokens=4)
    assert (cut.text, cut.finish, len(cut.token_ids)) == ("ď\ufffd", "length", 4)
    kept = run_one(model, "x", stop=["🌍"], include_stop_str_in_output=True)
    assert kept.text == "ď🌍"


def test_stop_token_ids_and_min_tokens_and_ignore_eos(tmp_path: Path) -> None:
    """Tokens 261 on are the pieces a, b, c; token 1 ends."""
    model = open_model(scripted_checkpoint(tmp_path / "m", "abc"))
    assert run_one(model, "x", stop_token_ids=[263]).text == "ab"
    assert run_one(model, "x", ignore_eos=True, max_tokens=6).finish == "length"
    longer = run_one(model, "x", min_tokens=6, max_tokens=8)
    assert len(longer.token_ids) >= 6
    assert 1 not in longer.token_ids[:6]
    early = run_one(model, "x", stop=["b"], min_tokens=3, max_tokens=3)
    assert (early.text, early.finish) == ("abc", "length"), "a stop string below min_tokens is let through"


def test_what_can_never_fit_is_refused_at_once(folder: Path) -> None:
    """512 tokens of context, or 4 blocks of 16: exactly full is taken, one more is refused with the numbers."""
    model = open_model(folder)
    make_request(model, [5] * 500, max_tokens=12)
    with pytest.raises(ContextLengthExceeded, match=r"^context_length_exceeded: 500 prompt tokens and max_tokens 13"):
        make_request(model, [5] * 500, max_tokens=13)
    small = open_model(folder, kv_pool_tokens=64)
    make_request(small, [5] * 60, max_tokens=4)
    with pytest.raises(ContextLengthExceeded, match="need 5 blocks of 16 tokens, the KV pool of this instance has 4"):
        make_request(small, [5] * 60, max_tokens=5)
    assert not model.engine.has_work, "a refusal leaves nothing behind"


@pytest.mark.parametrize("prompt", [[], [261], [-1]])
def test_a_prompt_outside_the_vocabulary_is_refused(folder: Path, prompt: list[int]) -> None:
    """The vocabulary has 261 tokens; and a prompt has at least one."""
    with pytest.raises(InvalidRequest) as refused:
        make_request(open_model(folder), prompt)
    assert refused.value.parameter == "prompt_token_ids"


@pytest.mark.parametrize(
    ("details", "parameter"),
    [({"phase": "other"}, "phase"), ({"adapter": {"digest": "x"}}, "adapter"), ({"salt": 5}, "salt")],
)
def test_details_of_the_wrong_kind_are_refused(folder: Path, details: dict[str, Any], parameter: str) -> None:
    """Each by its name."""
    with pytest.raises(InvalidRequest) as refused:
        make_request(open_model(folder), "x", details=details)
    assert refused.value.parameter == parameter


def test_requests_wait_in_order_for_blocks_and_slots(folder: Path) -> None:
    """A pool of 8 blocks: a needs 5, b 6, c 1. b waits for a; c could run, but does not overtake b."""
    model = open_model(folder, kv_pool_tokens=128)
    needs = {"a": (70, 10), "b": (90, 6), "c": (5, 5)}
    requests = {name: make_request(model, [7] * prompt, max_tokens=most) for name, (prompt, most) in needs.items()}
    for request in requests.values():
        model.engine.submit(request, 0.0)
    model.engine.step()
    statistics = model.engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.blocks_free) == (1, 2, 3)
    ended: list[str] = []
    while model.engine.has_work:
        ended += [event.request_id for event in model.engine.step() if getattr(event, "finish", None)]
    names = {request.request_id: name for name, request in requests.items()}
    assert [names[request_id] for request_id in ended] == ["a", "c", "b"]
    assert model.engine.statistics().blocks_free == 8


def test_no_more_requests_run_than_there_are_slots(folder: Path) -> None:
    """Five requests, two slots."""
    model = open_model(folder, slots=2)
    for _ in range(5):
        model.engine.submit(make_request(model, "x", max_tokens=4), 0.0)
    most = 0
    while model.engine.has_work:
        model.engine.step()
        most = max(most, model.engine.statistics().running)
    assert most == 2


def test_a_cancelled_request_is_gone_before_the_next_step(folder: Path) -> None:
    """Running or waiting: no further event, blocks and slot free; unknown ids are ignored."""
    model = open_model(folder, slots=1)
    requests = [make_request(model, "x", max_tokens=50) for _ in range(3)]
    for request in requests:
        model.engine.submit(request, 0.0)
    model.engine.step()
    model.engine.cancel([requests[0].request_id, requests[1].request_id, "unknown"])
    assert {event.request_id for event in model.engine.step()} == {requests[2].request_id}
    model.engine.cancel([requests[2].request_id])
    statistics = model.engine.statistics()
    assert not model.engine.has_work
    assert statistics.blocks_free == statistics.blocks_total


def test_a_long_prompt_does_not_hold_up_the_others(folder: Path) -> None:
    """With chunks of 16 tokens a prompt of 160 takes 10 steps, and the neighbour gets a token in each."""
    model = open_model(folder, prefill_chunk_tokens="16")
    short, long = make_request(model, "x", max_tokens=30), make_request(model, [9] * 160, max_tokens=2)
    model.engine.submit(short, 0.0)
    model.engine.step()
    model.engine.submit(long, 0.0)
    owners = [[event.request_id for event in model.engine.step()] for _ in range(10)]
    assert owners[:9] == [[short.request_id]] * 9
    assert set(owners[9]) == {short.request_id, long.request_id}


def test_a_numeric_fault_of_one_request_leaves_its_neighbour_alone(folder: Path, tmp_path: Path) -> None:
    """An adapter whose finite values overflow gives NaN: its request fails, the other's tokens are as ever."""
    model = open_model(folder)
    path = random_adapter(tmp_path / "huge", folder)
    weights = path / "adapter_model.safetensors"
    huge = {name: tensor * np.float32(1e25) for name, tensor in read_safetensors(weights).items()}
    weights.write_bytes(safetensors_bytes(huge, "float32"))
    bad = make_request(model, "prompt", details={"adapter": {"path": str(path), "digest": "h"}})
    outcomes = run_requests(model, [make_request(model, "prompt"), bad])
    assert (outcomes[1].error or "").startswith("numeric_fault:")
    assert outcomes[1].token_ids == []
    assert outcomes[0].token_ids == run_one(model, "prompt").token_ids


def test_embeddings_have_length_one_and_do_not_depend_on_chunks_or_neighbours(folder: Path) -> None:
    """Mean of the final states; different prompts, different directions."""
    vectors = []
    for chunk in ("7", "128"):
        model = open_model(folder, prefill_chunk_tokens=chunk)
        requests = [make_request(model, text * 9, details={"phase": "embed"}) for text in ("one ", "other ")]
        events = [outcome.events[-1] for outcome in run_requests(model, requests)]
        vectors.append([event.vector for event in events if isinstance(event, Embedded)])
    assert np.array_equal(vectors[0], vectors[1])
    first, second = vectors[0]
    assert np.linalg.norm(first) == pytest.approx(1.0)
    assert float(first @ second) < 0.999


class MemoryBlockStore:
    """A block store in memory that counts what is held."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, bytes], BlockArray] = {}
        self.held = 0

    def lookup(self, space: BlockSpace, keys: Sequence[bytes], patience_ms: int = 0) -> CachedPrefix:
        found: list[BlockArray] = []
        salt = space.salt
        for key in keys:
            if (salt, key) not in self.blocks:
                break
            found.append(self.blocks[salt, key])
        self.held += 1
        return CachedPrefix(tuple(found), self._let_go)

    def _let_go(self) -> None:
        self.held -= 1

    def offer(self, space: BlockSpace, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
        self.blocks.update({(space.salt, key): block for key, block in zip(keys[-len(blocks) :], blocks, strict=True)})

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.blocks.clear()


def open_with_store(folder: Path, monkeypatch: pytest.MonkeyPatch, store: MemoryBlockStore) -> LoadedModel:
    """A model that reuses blocks through `store`."""
    monkeypatch.setattr("engines.reference.loaded_model.open_block_store", lambda parameters, shape: store)
    return open_model(folder, model_digest="ab" * 32)


def salted(model: LoadedModel, prompt: Sequence[int], salt: str, **params: Any) -> GenerationRequest:
    """A request of the tenant with `salt`."""
    return make_request(model, prompt, details={"salt": salt}, **params)


def test_text_with_cached_blocks_equals_text_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 11. 40 tokens are 2 whole blocks; a follow-up that repeats prompt and answer finds those of both."""
    store = MemoryBlockStore()
    model = open_with_store(folder, monkeypatch, store)
    prompt = np.random.default_rng(0).integers(5, 261, 40).tolist()
    cold = run_requests(model, [salted(model, prompt, "aa", max_tokens=30)])[0]
    warm = run_requests(model, [salted(model, prompt, "aa", max_tokens=30)])[0]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    assert warm.token_ids == cold.token_ids
    # 40 + 29 computed tokens (the last one is never run through the model): 4 whole blocks.
    longer = [*prompt, *cold.token_ids, 9, 9]
    follow_up = run_requests(model, [salted(model, longer, "aa")])[0]
    assert follow_up.cached_tokens == 4 * BLOCK_TOKENS
    assert follow_up.token_ids == run_one(open_model(folder), longer).token_ids
    assert store.held == 0, "every prefix is released"


def test_a_token_is_always_left_to_compute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of exactly 2 blocks, both stored: only the first is used, since the last token's scores are needed."""
    model = open_with_store(folder, monkeypatch, MemoryBlockStore())
    prompt = list(range(10, 42))
    cold, warm = (run_requests(model, [salted(model, prompt, "aa")])[0] for _ in range(2))
    assert warm.cached_tokens == BLOCK_TOKENS
    assert warm.token_ids == cold.token_ids


def test_tenants_do_not_share_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another salt finds nothing; no salt stores nothing and finds nothing."""
    store = MemoryBlockStore()
    model = open_with_store(folder, monkeypatch, store)
    prompt = list(range(10, 60))
    assert run_one(model, prompt).cached_tokens == 0
    assert not store.blocks
    run_requests(model, [salted(model, prompt, "aa")])
    assert run_requests(model, [salted(model, prompt, "bb")])[0].cached_tokens == 0
    assert run_one(model, prompt).cached_tokens == 0


def test_blocks_of_another_shape_are_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers nonsense costs time, not correctness."""
    store = MemoryBlockStore()
    model = open_with_store(folder, monkeypatch, store)
    prompt = list(range(10, 60))
    cold = run_requests(model, [salted(model, prompt, "aa")])[0]
    store.blocks = {key: block[:1] for key, block in store.blocks.items()}
    warm = run_requests(model, [salted(model, prompt, "aa")])[0]
    assert (warm.cached_tokens, warm.token_ids) == (0, cold.token_ids)
    assert store.held == 0


def test_cancelled_and_refused_requests_release_their_prefix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is cancelled while it waits holds nothing any more; a refused one never looked up."""
    store = MemoryBlockStore()
    model = open_with_store(folder, monkeypatch, store)
    request = salted(model, list(range(10, 60)), "aa")
    assert store.held == 1
    model.engine.submit(request, 0.0)
    model.engine.cancel([request.request_id])
    with pytest.raises(ContextLengthExceeded):
        salted(model, [5] * 600, "aa")
    assert store.held == 0


class BrokenBlock:
    """An array of the right shape whose memory is gone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, index: Any) -> Any:
        raise BufferError("unmapped")


def test_a_fault_while_blocks_are_copied_ends_the_request_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 1 and 12: the request is told, its blocks are free, its prefix is released, the next one runs."""
    store = MemoryBlockStore()
    model = open_with_store(folder, monkeypatch, store)
    prompt = list(range(10, 60))
    run_requests(model, [salted(model, prompt, "aa")])
    broken = BrokenBlock(model.block_shape.dimensions)
    monkeypatch.setattr(store, "lookup", lambda *_: CachedPrefix((broken,)))  # type: ignore[arg-type]
    request = salted(model, prompt, "aa")
    model.engine.submit(request, 0.0)
    with pytest.raises(BufferError):
        model.engine.step()
    assert [event.request_id for event in model.engine.fail_all("engine_fault: BufferError")] == [request.request_id]
    statistics = model.engine.statistics()
    assert (statistics.running, statistics.blocks_free) == (0, statistics.blocks_total)
    assert run_one(model, "x").finish == "length"


def test_the_prompt_is_scored_as_the_same_tokens_were_when_they_were_chosen(folder: Path) -> None:
    """The log probability of each token of a completion is what the engine says of it as a part of the prompt, whatever
    chunks the prompt comes in; the first token has none; who did not ask gets none; cached blocks are not used."""
    model = open_model(folder)
    begin = list(range(3, 20))
    [said] = run_requests(model, [make_request(model, begin, max_tokens=12, ignore_eos=True, logprobs=2)])
    chosen = [event.logprobs for event in said.events if isinstance(event, TokenGenerated)]
    whole = [*begin, *said.token_ids]
    asked = make_request(model, whole, max_tokens=2, ignore_eos=True, prompt_logprobs=2, details={"salt": "00" * 32})
    [scored, silent] = run_requests(model, [asked, make_request(model, whole, max_tokens=2)])
    first = scored.events[0]
    assert isinstance(first, TokenGenerated)
    assert len(first.prompt_logprobs) == len(whole) - 1
    for said_before, said_now in zip(chosen, first.prompt_logprobs[len(begin) - 1 :], strict=True):
        assert said_before is not None
        assert said_now.chosen == pytest.approx(said_before.chosen, abs=1e-5)
        assert [token for token, _ in said_now.top] == [token for token, _ in said_before.top]
    assert not any(event.prompt_logprobs for event in silent.events if isinstance(event, TokenGenerated))
    assert not any(event.prompt_logprobs for event in scored.events[1:] if isinstance(event, TokenGenerated))
