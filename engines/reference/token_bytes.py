"""The tokenizer of a checkpoint, and the exact bytes of each of its tokens.

Bytes rather than decoded strings, because a token may hold part of a character. Byte-level vocabularies (GPT-2, Llama
3, Qwen) write a byte as one printable character; SentencePiece ones (Llama 2, Mistral) write a space as U+2581 and
bytes as `<0xE4>`. Source: `bytes_to_unicode` of GPT-2's encoder, and the decoders of `tokenizers`.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from engines.reference.model_config import CheckpointError


def byte_characters() -> dict[str, int]:
    """GPT-2's printable character of each byte, reversed: character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return characters


class TokenText:
    """Encodes prompts and gives the bytes of tokens. Thread-safe once built."""

    def __init__(self, serialized: str) -> None:
        """Take the text of a `tokenizer.json`; raises `CheckpointError`."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
            layout: dict[str, Any] = json.loads(serialized)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json: {error}") from error
        added = layout.get("added_tokens") or []
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self._special = frozenset(int(token["id"]) for token in added if token.get("special"))
        self._byte_level = '"ByteLevel"' in json.dumps(layout.get("decoder"))

    @staticmethod
    def load(folder: Path) -> TokenText:
        """Read `tokenizer.json` of a checkpoint folder; raises `CheckpointError`."""
        try:
            return TokenText((folder / "tokenizer.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"tokenizer.json: no such file in {folder}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer itself puts around a text."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token rather than text."""
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes the token stands for; empty for an id that the tokenizer has no token for."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        return self._byte_level_bytes(token) if self._byte_level else _sentencepiece_bytes(token)

    @cached_property
    def _characters(self) -> dict[str, int]:
        return byte_characters()

    def _byte_level_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._characters[character] for character in token)
        except KeyError:
            return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
