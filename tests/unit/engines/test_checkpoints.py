"""Checkpoint folders are read whole or refused by the name of what is wrong, and written the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.checkpoint_writer import safetensors_bytes
from engines.reference.checkpoint import load_tensors, read_safetensors
from engines.reference.model_config import CheckpointError, load_model_config, parse_model_config
from engines.reference.token_bytes import TokenText
from engines.reference.weights import arrange_weights
from tests.builders.checkpoints import distinct_pieces, random_checkpoint, scripted_checkpoint

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 3}, "head_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(change: dict[str, Any], named: str) -> None:
    """By the name of the field."""
    with pytest.raises(CheckpointError, match=named):
        parse_model_config({**BASE, **change}, {})


def test_end_tokens_come_from_the_generation_config_first() -> None:
    """A list there wins over a single one in config.json."""
    assert parse_model_config({**BASE, "eos_token_id": 1}, {"eos_token_id": [2, 3]}).eos_token_ids == (2, 3)
    assert parse_model_config({**BASE, "eos_token_id": 1}, {}).eos_token_ids == (1,)
    assert parse_model_config(BASE, {}).eos_token_ids == ()


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_tensors_survive_the_file_up_to_their_precision(tmp_path: Path, dtype: str, bits: int) -> None:
    """Relative error at most half a unit in the last of `bits` places."""
    tensor = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    (tmp_path / "t").write_bytes(safetensors_bytes({"x": tensor}, dtype))
    np.testing.assert_allclose(read_safetensors(tmp_path / "t")["x"], tensor, rtol=2.0**-bits)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor, or has one of another shape, fails the load with its name."""
    folder = random_checkpoint(tmp_path / "m")
    config, tensors = load_model_config(folder), load_tensors(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        arrange_weights(config, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=r"is \[3, 3\], config.json asks for \[48, 32\]"):
        arrange_weights(config, {**tensors, name: np.zeros((3, 3), np.float32)})


def test_files_that_are_broken_are_named(tmp_path: Path) -> None:
    """No folder, no JSON, a cut tensor file, a shard outside the folder, no tokenizer."""
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    folder = random_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        load_model_config(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        load_tensors(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_tensors(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TokenText.load(folder)


def test_the_byte_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    """One token a byte, and each token's bytes are exact."""
    tokens = TokenText.load(random_checkpoint(tmp_path / "m"))
    text = "plain, ď🌍你, \x00 and\n"
    ids = tokens.encode(text)
    assert len(ids) == len(text.encode())
    assert b"".join(tokens.bytes_of(token_id) for token_id in ids) == text.encode()
    assert tokens.is_special(1)
    assert not tokens.is_special(5)
    assert tokens.bytes_of(99_999) == b""


def test_sentencepiece_tokens_have_their_bytes() -> None:
    """U+2581 is a space, `<0xE4>` is a byte, everything else is its own text."""
    layout = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": {"\u2581the": 0, "<0xE4>": 1, "é": 2}, "merges": [], "byte_fallback": True},
    }
    tokens = TokenText(json.dumps(layout))
    assert [tokens.bytes_of(i) for i in range(3)] == [b" the", b"\xe4", "é".encode()]


def test_builders_write_the_same_bytes_each_time(tmp_path: Path) -> None:
    """And other bytes for another seed."""
    first, second, other = (random_checkpoint(tmp_path / n, s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    read = [(path / "model.safetensors").read_bytes() for path in (first, second, other)]
    assert read[0] == read[1]
    assert read[0] != read[2]


def test_a_script_is_cut_into_distinct_pieces(tmp_path: Path) -> None:
    """Pieces join to the text and differ; a repeated byte is refused where each byte must be a token."""
    for text in (b"ALPHA", b"aaaa", b"abracadabra", b"x"):
        pieces = distinct_pieces(text)
        assert b"".join(pieces) == text
        assert len(set(pieces)) == len(pieces)
    with pytest.raises(ValueError, match="occurs twice"):
        scripted_checkpoint(tmp_path / "m", "ALPHA")
