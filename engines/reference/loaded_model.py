"""Puts one engine together from the parameters of its Triton model: the composition root of the reference engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.reference.checkpoint import load_tensors
from engines.reference.decoder import Decoder
from engines.reference.kv_cache import BlockShape, BlockStore, open_block_store
from engines.reference.mapped_weights import parse_mapped_files
from engines.reference.model_config import ModelConfig, load_model_config
from engines.reference.paged_kv import BLOCK_TOKENS, BlockPool, blocks_for
from engines.reference.peft_format import AdapterCache
from engines.reference.sequence import EngineLimits
from engines.reference.step_engine import StepEngine
from engines.reference.token_bytes import TokenText
from engines.reference.weights import arrange_weights
from roundhouse.catalogue.lora_format import RANK_MAX

ADAPTERS_IN_MEMORY = 32  # a guess: a demo adapter is about 0.1 MB
PREFILL_CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that serves one model version."""

    config: ModelConfig
    tokens: TokenText
    limits: EngineLimits
    blocks_total: int
    block_shape: BlockShape
    model_digest: bytes
    store: BlockStore
    adapters: AdapterCache
    engine: StepEngine


def named_bytes(text: str) -> bytes:
    """A salt or digest as bytes: hexadecimal, with or without `sha256:` before it; any other text as UTF-8."""
    try:
        return bytes.fromhex(text.removeprefix("sha256:"))
    except ValueError:
        return text.encode()


def load_model(parameters: Mapping[str, str]) -> LoadedModel:
    """Load the checkpoint at `weights_path`; raises `CheckpointError`. Parameters are described in `packaging`."""
    folder = Path(parameters["weights_path"])
    config = load_model_config(folder)
    blocks_total = blocks_for(int(parameters["kv_pool_tokens"]))
    shape = BlockShape(config.layers, config.kv_heads, BLOCK_TOKENS, config.head_dim)
    limits = EngineLimits(
        slots=int(parameters["slots"]),
        context_tokens=config.context_tokens,
        prefill_chunk_tokens=int(parameters.get("prefill_chunk_tokens", PREFILL_CHUNK_TOKENS)),
    )
    weights = arrange_weights(config, load_tensors(folder, parse_mapped_files(parameters.get("weights_arena", ""))))
    positions = min(config.context_tokens, blocks_total * BLOCK_TOKENS)
    decoder = Decoder(config, weights, BlockPool(shape, blocks_total), positions)
    tokens = TokenText.load(folder)
    store = open_block_store(parameters, shape)
    return LoadedModel(
        config=config,
        tokens=tokens,
        limits=limits,
        blocks_total=blocks_total,
        block_shape=shape,
        model_digest=named_bytes(parameters.get("model_digest", "")),
        store=store,
        adapters=AdapterCache(
            config,
            int(parameters.get("adapters_in_memory", ADAPTERS_IN_MEMORY)),
            int(parameters.get("adapter_rank_max", RANK_MAX)),
        ),
        engine=StepEngine(decoder, tokens, limits, store, time.monotonic),
    )
