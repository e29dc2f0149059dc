"""Block keys: the committed vectors, the chain, whole blocks only, and what is refused."""

import hashlib
import json
import struct
from pathlib import Path

import pytest

from roundhouse.block_keys import SharedBeginning, group_salt, prefix_block_keys, tenant_salt

GOLDEN = json.loads((Path(__file__).parent / "golden" / "block_keys.json").read_text())


@pytest.mark.parametrize("vector", GOLDEN["prefix_block_keys"], ids=lambda vector: str(vector["name"]))
def test_keys_match_the_committed_vectors(vector: dict[str, object]) -> None:
    """Keys never change within `v1`: nodes of two releases share blocks."""
    keys = prefix_block_keys(
        bytes.fromhex(str(vector["salt"])),
        bytes.fromhex(str(vector["model_digest"])),
        bytes.fromhex(str(vector["adapter_digest"])),
        int(str(vector["block_tokens"])),
        vector["token_ids"],  # type: ignore[arg-type]  # JSON list of integers
    )
    assert [key.hex() for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", GOLDEN["tenant_salt"], ids=lambda vector: str(vector["cluster"]))
def test_salts_match_the_committed_vectors(vector: dict[str, str]) -> None:
    """Salts never change within `v1`."""
    assert tenant_salt(vector["cluster"], vector["tenant_id"]).hex() == vector["salt"]


@pytest.mark.parametrize("vector", GOLDEN["shared_beginning"], ids=lambda vector: str(vector["name"]))
def test_keys_of_a_shared_beginning_match_the_committed_vectors(vector: dict[str, object]) -> None:
    """The group's salt keys its blocks, the tenant's the others."""
    keys = prefix_block_keys(
        bytes.fromhex(str(vector["salt"])),
        bytes.fromhex(str(vector["model_digest"])),
        bytes.fromhex(str(vector["adapter_digest"])),
        int(str(vector["block_tokens"])),
        vector["token_ids"],  # type: ignore[arg-type]  # JSON list of integers
        SharedBeginning(bytes.fromhex(str(vector["shared_salt"])), int(str(vector["shared_blocks"]))),
    )
    assert [key.hex() for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", GOLDEN["group_salt"], ids=lambda vector: str(vector["group"]))
def test_group_salts_match_the_committed_vectors_and_are_no_tenants(vector: dict[str, str]) -> None:
    """B25: a tenant that bears the group's name has another salt."""
    assert group_salt(vector["cluster"], vector["group"]).hex() == vector["salt"]
    assert tenant_salt(vector["cluster"], vector["group"]).hex() != vector["salt"]


def test_members_of_a_group_share_the_beginning_and_nothing_after_it() -> None:
    """2 of 4 blocks are the group's: equal for two tenants, and for none of them alone; the other 2 differ for all."""
    shared = SharedBeginning(b"group", 2)
    one, two = (prefix_block_keys(salt, b"m", b"", 16, range(64), shared) for salt in (b"one", b"two"))
    alone = prefix_block_keys(b"one", b"m", b"", 16, range(64))
    assert one[:2] == two[:2]
    assert len({*one, *two, *alone}) == 2 + 2 + 2 + 4


def test_first_key_is_the_hash_of_its_tagged_fields() -> None:
    """The layout, written out by hand: tag (u8), length (u64 LE), bytes; tokens as u32 LE."""

    def field(tag: int, value: bytes) -> bytes:
        return bytes([tag]) + len(value).to_bytes(8, "little") + value

    expected = hashlib.sha256(
        field(1, b"roundhouse/block/v1")
        + field(2, b"s")
        + field(3, b"m")
        + field(4, b"")
        + field(5, (2).to_bytes(8, "little"))
        + field(6, b"")
        + field(7, struct.pack("<2I", 7, 8))
    ).digest()
    assert prefix_block_keys(b"s", b"m", b"", 2, [7, 8, 9]) == [expected]


def test_only_whole_blocks_have_keys() -> None:
    """47 tokens in blocks of 16 are floor(47/16) = 2 keys; 15 tokens are none."""
    assert len(prefix_block_keys(b"s", b"m", b"", 16, range(47))) == 2
    assert prefix_block_keys(b"s", b"m", b"", 16, range(15)) == []


def test_a_longer_prompt_keeps_the_keys_of_its_prefix() -> None:
    """Two prompts that share 32 tokens share 2 keys and no later one, though their third blocks are equal."""
    shared = list(range(32))
    one = prefix_block_keys(b"s", b"m", b"", 16, [*shared, *([1] * 16), *([5] * 16)])
    two = prefix_block_keys(b"s", b"m", b"", 16, [*shared, *([2] * 16), *([5] * 16)])
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])


def test_an_adapter_cannot_stand_for_a_salt() -> None:
    """B25: adapter `blue` and salt `blue`, tenant `a:b` + model `c` and tenant `a` + model `b:c`: all keys differ."""
    prompt = range(16)
    keys = [
        prefix_block_keys(b"", b"m", b"blue", 16, prompt)[0],
        prefix_block_keys(b"blue", b"m", b"", 16, prompt)[0],
        prefix_block_keys(b"a:b", b"c", b"", 16, prompt)[0],
        prefix_block_keys(b"a", b"b:c", b"", 16, prompt)[0],
        prefix_block_keys(b"a:", b"bc", b"", 16, prompt)[0],
    ]
    assert len(set(keys)) == len(keys)
    assert tenant_salt("a:b", "c") != tenant_salt("a", "b:c")


def test_block_size_is_part_of_the_key() -> None:
    """A first block of 16 tokens is not the first two blocks of 8."""
    assert not set(prefix_block_keys(b"s", b"m", b"", 8, range(16))) & set(
        prefix_block_keys(b"s", b"m", b"", 16, range(16))
    )


@pytest.mark.parametrize("token_ids", [[-1], [2**32], ["x"]])
def test_token_ids_outside_32_bits_are_refused(token_ids: list[int]) -> None:
    """A key over a cut-off number would name two prompts."""
    with pytest.raises(ValueError, match="token id"):
        prefix_block_keys(b"s", b"m", b"", 1, token_ids)


def test_a_block_of_no_tokens_is_refused() -> None:
    """Zero and negative block sizes are errors, not endless loops."""
    with pytest.raises(ValueError, match="at least one token"):
        prefix_block_keys(b"s", b"m", b"", 0, [1])
