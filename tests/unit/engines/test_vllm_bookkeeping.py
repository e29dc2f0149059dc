"""The vLLM connector's bookkeeping, without vLLM: which blocks are stored when, and under which names."""

from engines.vllm.block_saves import TrackedRequest, keys_of, layout_digest, save_plan
from roundhouse.block_keys import prefix_block_keys

DIGEST = layout_digest(b"model", "torch.bfloat16", [(32, 8, 128, 65_536)] * 2)


def tracked(tokens: int, blocks: int) -> TrackedRequest:
    """A request of so many tokens, for which vLLM has so many blocks."""
    return TrackedRequest(b"salt", b"", list(range(tokens)), list(range(100, 100 + blocks)))


def test_blocks_are_stored_when_they_are_whole_and_once() -> None:
    """150 tokens in blocks of 32, computed in steps of 64, 64 and 22: 2 blocks, 2 blocks, none."""
    request = tracked(150, 5)
    keys = prefix_block_keys(b"salt", DIGEST, b"", 32, range(150))
    first, second, third = (save_plan("r", request, DIGEST, 32, computed) for computed in (64, 128, 150))
    assert first is not None
    assert (first.parent_key, first.keys, first.block_ids) == (b"", tuple(keys[:2]), (100, 101))
    assert second is not None
    assert (second.parent_key, second.keys, second.block_ids) == (keys[1], tuple(keys[2:4]), (102, 103))
    assert third is None


def test_what_was_loaded_is_not_stored_again() -> None:
    """2 blocks came from the store: the third is stored below them."""
    request = tracked(100, 4)
    request.stored = 2
    plan = save_plan("r", request, DIGEST, 32, 100)
    assert plan is not None
    assert (plan.block_ids, plan.parent_key) == ((102,), keys_of(request, DIGEST, 32, 100)[1])


def test_tokens_that_are_not_known_yet_make_no_block() -> None:
    """vLLM may plan a step ahead of the tokens it has: 70 are known, 96 will be computed: 2 blocks."""
    plan = save_plan("r", tracked(70, 3), DIGEST, 32, 96)
    assert plan is not None
    assert len(plan.keys) == 2


def test_another_layout_is_another_model() -> None:
    """B26's kind: the same weights in another number format, shape or engine share no block."""
    others = {
        layout_digest(b"model", "torch.float32", [(32, 8, 128, 65_536)] * 2),
        layout_digest(b"model", "torch.bfloat16", [(16, 8, 128, 65_536)] * 2),
        layout_digest(b"model", "torch.bfloat16", [(32, 8, 128, 65_536)] * 3),
        layout_digest(b"other", "torch.bfloat16", [(32, 8, 128, 65_536)] * 2),
        b"model",
    }
    assert len({DIGEST, *others}) == 6
