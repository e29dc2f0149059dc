"""An adapter that does not fit its base is refused where it is declared, with what is wrong and where."""

from pathlib import Path

import pytest

from roundhouse.catalogue.assembly import FileReading, assemble
from roundhouse.catalogue.declaration import parse
from roundhouse.catalogue.digests import DigestCache, version_digest
from roundhouse.catalogue.lora import ADAPTER_INVALID, check_adapter
from roundhouse.catalogue.problems import DeclarationRefused
from roundhouse.catalogue.records import Catalogue, Engine
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import AdapterName
from tests.unit.catalogue.files import CONFIG, GOOD, lora, write_models

MISFITS = {
    "rank over the engine's": ({"rank": 65}, "r must be in [1, 64], not 65"),
    "another hidden size": ({"inputs": 16}, "layer 0 self_attn.q_proj lora_A is [2, 16], not [2, 8]"),
    "a layer that is not there": ({"layer": 3}, "made for another base: layer 3, this base has 3 layers"),
    "an unknown module": ({"target_modules": ["w_qkv"]}, "target_modules ['w_qkv'] are not in [q_proj, k_proj"),
    "a tensor of no target": ({"target_modules": ["v_proj"]}, "self_attn.q_proj.lora_A.weight is not of a target"),
    "another rank than it says": ({"r": 4}, "lora_A is [2, 8], not [4, 8]"),
    "a variant": ({"use_dora": True}, "use_dora is not supported"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
    "another method": ({"peft_type": "IA3"}, "peft_type must be LORA"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported"),
}


def assembled(text: str, root: Path) -> Catalogue:
    """The catalogue of a text below `root`."""
    return assemble(parse(text, "c.yaml", root), FileReading(DigestCache()))


@pytest.mark.parametrize(("settings", "reason"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_named(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    """Rank, modules, layers and shapes against a base of hidden size 8, 3 layers, 2 heads."""
    folder = lora(tmp_path / "a", **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput) as refused:
        check_adapter(folder, Engine.REFERENCE, CONFIG)
    assert reason in refused.value.message
    assert refused.value.code == ADAPTER_INVALID


@pytest.mark.parametrize("engine", [Engine.REFERENCE, Engine.VLLM, Engine.TRITON])
@pytest.mark.parametrize("config", [CONFIG, {}, None])
def test_a_good_one_fits(tmp_path: Path, engine: Engine, config: dict[str, int] | None) -> None:
    """Against the base, and against one that does not tell its shapes. But not over vLLM, where a wrong one would end
    the engine for everybody: there it fits when the base was read and tells; at an address its loader reads it."""
    if engine is Engine.VLLM and config == {}:
        with pytest.raises(InvalidInput, match="does not tell its projections"):
            check_adapter(lora(tmp_path / "a"), engine, config)
    else:
        check_adapter(lora(tmp_path / "a"), engine, config)


@pytest.mark.parametrize("misfit", MISFITS)
def test_over_vllm_the_same_is_refused_and_what_it_has_no_room_for(tmp_path: Path, misfit: str) -> None:
    """Rank 2 fits a base with room for rank 16, not one with room for 1."""
    settings, reason = MISFITS[misfit]
    with pytest.raises(InvalidInput) as refused:
        check_adapter(lora(tmp_path / "a", **settings), Engine.VLLM, CONFIG)  # type: ignore[arg-type]
    assert reason in refused.value.message
    check_adapter(lora(tmp_path / "b"), Engine.VLLM, CONFIG, 16)
    with pytest.raises(InvalidInput, match=r"r must be in \[1, 1\], not 2"):
        check_adapter(lora(tmp_path / "c"), Engine.VLLM, CONFIG, 1)


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.TRITON])
def test_other_engines_are_checked_as_far_as_the_files_tell(tmp_path: Path, engine: Engine) -> None:
    """Rank 4 is declared, the tensors have 2; where the base tells, its hidden size counts too."""
    with pytest.raises(InvalidInput, match=r"lora_A is \[2, 8\], not \[4, 8\]"):
        check_adapter(lora(tmp_path / "a", r=4), engine, None)
    with pytest.raises(InvalidInput, match=r"lora_A is \[2, 16\], not \[2, 8\]"):
        check_adapter(lora(tmp_path / "b", inputs=16), engine, CONFIG)


def test_half_a_file_is_no_adapter(tmp_path: Path) -> None:
    """Weights cut short, weights that are missing, settings that are no JSON."""
    cut, missing, garbled = lora(tmp_path / "a"), lora(tmp_path / "b"), lora(tmp_path / "c")
    (cut / "adapter_model.safetensors").write_bytes(b"\x10")
    (missing / "adapter_model.safetensors").unlink()
    (garbled / "adapter_config.json").write_text("{")
    for folder, reason in ((cut, "cut short"), (missing, "is not there"), (garbled, "is not JSON")):
        with pytest.raises(InvalidInput, match=reason):
            check_adapter(folder, Engine.REFERENCE, CONFIG)


def test_apply_refuses_it_at_its_line(tmp_path: Path) -> None:
    """The problem stands at the adapter's path; the models of the file are not the matter."""
    root = write_models(tmp_path)
    text = GOOD + "  - {name: wide, base: chat, source: {path: adapters/wide}}\n"
    lora(root / "adapters" / "wide", inputs=16)
    with pytest.raises(DeclarationRefused) as refused:
        assembled(text, root)
    (problem,) = refused.value.problems
    assert problem.place.line == len(text.splitlines())
    assert "lora_A is [2, 16], not [2, 8]" in problem.reason


def test_the_base_it_was_made_for(tmp_path: Path) -> None:
    """A digest that is the base's passes and is kept; another one is refused and names the right one."""
    root = write_models(tmp_path)
    right, wrong = version_digest(root / "models" / "chat"), f"sha256:{'0' * 64}"
    pinned = GOOD.replace("    base: chat\n", f"    base: chat\n    base_digest: {right}\n")
    assert assembled(pinned, root).adapters[AdapterName("chat-acme")].base_digest == right
    with pytest.raises(DeclarationRefused, match=f"has the digest {right}"):
        assembled(pinned.replace(right, wrong), root)


ADDRESSED = """\
  - name: far
    source:
      path: s3://bucket/chat/v1
      files:
        - {name: config.json, size: 10, sha256: HASH}
        - {name: sub/model.safetensors, size: 1000, sha256: HASH}
    engine: reference
    context_tokens: 64
    tokenizer: models/chat
    memory: {device: 1MiB}
adapters:
""".replace("HASH", "ab" * 32)


def with_address(*changes: tuple[str, str]) -> str:
    """`GOOD` with a model at an address, changed."""
    text = ADDRESSED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return GOOD.replace("adapters:\n", text, 1)


def test_a_model_at_an_address(tmp_path: Path) -> None:
    """Its digest is over the listed files; nothing is fetched; the tokenizer is a path of the gateways."""
    far = assembled(with_address(), write_models(tmp_path)).models["far"]  # type: ignore[index]
    assert far.source_path == "s3://bucket/chat/v1"
    assert [(file.name, file.size) for file in far.files] == [("config.json", 10), ("sub/model.safetensors", 1000)]
    assert far.digest.startswith("sha256:")
    assert (far.device_bytes, far.context_tokens, far.kv_pool_tokens) == (2**20, 64, 256)
    assert far.tokenizer_path == str(tmp_path / "models" / "chat")


WRONG_ADDRESSES = {
    "scheme": (("s3://bucket", "ftp://bucket"), "no loader knows the scheme `ftp`: there are http, https, s3"),
    "credentials": (("s3://bucket", "https://me:secret@host"), "must not hold credentials"),
    "signature": (("chat/v1", "chat/v1?X-Amz-Signature=1"), "no query"),
    "host": (("s3://bucket/chat/v1", "s3:///chat"), "names no host or bucket"),
    "above its folder": (("sub/model", "../model"), "must be a name below the address"),
    "twice": (("sub/model.safetensors", "config.json"), "`config.json` is listed twice"),
    "device": (("    memory: {device: 1MiB}\n", ""), "`memory.device` is missing"),
    "context": (("    context_tokens: 64\n", ""), "`context_tokens` is missing"),
    "tokenizer": (("    tokenizer: models/chat\n", ""), "`tokenizer` is missing"),
    "no tokenizer there": (("tokenizer: models/chat", "tokenizer: models/none"), "there is no tokenizer.json"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG_ADDRESSES.values(), ids=WRONG_ADDRESSES)
def test_what_is_wrong_with_an_address(tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    """One problem each, which says what to do, and never repeats a credential."""
    with pytest.raises(DeclarationRefused) as refused:
        assembled(with_address(change), write_models(tmp_path))
    (problem,) = refused.value.problems
    assert reason in problem.reason
    assert "secret" not in problem.reason


def test_a_list_of_files_goes_with_an_address_only(tmp_path: Path) -> None:
    """And an address without one is refused."""
    text = GOOD.replace("{path: models/chat}", "{path: models/chat, files: [{name: a, size: 1, sha256: HASH}]}")
    with pytest.raises(DeclarationRefused, match="a path needs no list"):
        assembled(text.replace("HASH", "ab" * 32), write_models(tmp_path))
    bare = GOOD.replace("path: adapters/chat-acme", "path: https://host/a")
    with pytest.raises(DeclarationRefused, match="`files` is missing"):
        assembled(bare, tmp_path)
