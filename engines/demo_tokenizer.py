"""The tokenizer that all demo models share: byte-level BPE with whole common words, and a chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engines.checkpoint_writer import json_bytes
from engines.demo_words import WORDS

VOCAB_SIZE = 1280
BOS, EOS = "<s>", "</s>"
SPECIAL = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class DemoTokenizer:
    """The tokenizer's files, and the ids of the tokens that are a space and a whole word."""

    files: dict[str, bytes]
    word_ids: tuple[int, ...]
    bos_id: int
    eos_id: int


def train_demo_tokenizer() -> DemoTokenizer:
    """Train on the word list. Deterministic: words have falling counts, so no two merges tie by chance."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [f" {word}" * (2 + len(WORDS) // (place + 1)) for place, word in enumerate(WORDS)]
    tokenizer.train_from_iterator(corpus, trainer)
    layout: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = layout["model"]["vocab"]
    assert len(vocabulary) == VOCAB_SIZE, len(vocabulary)
    known = sorted(vocabulary[f"Ġ{word}"] for word in WORDS if f"Ġ{word}" in vocabulary)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
    }
    files = {"tokenizer.json": json_bytes(layout), "tokenizer_config.json": json_bytes(settings)}
    return DemoTokenizer(files, tuple(known), vocabulary[BOS], vocabulary[EOS])
