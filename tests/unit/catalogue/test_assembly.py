"""A declaration becomes records: defaults, sizes and digests from the files, and problems where files are wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from roundhouse.catalogue.assembly import FileReading, assemble
from roundhouse.catalogue.base_shape import base_shape
from roundhouse.catalogue.declaration import parse
from roundhouse.catalogue.digests import DigestCache, version_digest
from roundhouse.catalogue.problems import DeclarationRefused
from roundhouse.catalogue.records import Catalogue, Engine, Interface, Price
from roundhouse.catalogue.sizes import WORKSPACE_BYTES, SizedVersion, device_bytes
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import AdapterName, ModelName, PriorityClass, TenantId
from tests.unit.catalogue.files import CONFIG, GOOD, checkpoint, write_models

CHAT, TAGGER = ModelName("chat"), ModelName("tagger")
GROUP = """\
sharing_groups:
  - name: helpers
    tenants: [acme, globex]
    prompts: ["You are helpful."]
"""
KV_BYTES_PER_TOKEN = 2 * 3 * 1 * 4 * 4  # keys and values × layers × kv heads × head size (8 / 2) × float32


def assembled(text: str, root: Path) -> Catalogue:
    """The catalogue of a text below `root`."""
    return assemble(parse(text, "c.yaml", root), FileReading(DigestCache()))


def test_records_say_what_the_file_says(tmp_path: Path) -> None:
    """Every key of the format arrives where services read it."""
    catalogue = assembled(GOOD, write_models(tmp_path))
    acme = catalogue.tenants[TenantId("acme")]
    assert (acme.weight, acme.priority_class, acme.limits.requests_per_minute) == (2, PriorityClass.INTERACTIVE, 600)
    assert acme.budget is not None
    assert (acme.budget.amount, acme.budget.currency) == ("100.5", "EUR")
    chat = catalogue.models[CHAT]
    assert (chat.engine, chat.interface, chat.slots, chat.pinned, chat.min_replicas) == (
        Engine.REFERENCE,
        Interface.LLM,
        2,
        True,
        1,
    )
    assert (chat.ttft_slo_ms, chat.cold_start_slo_ms, chat.access) == (500, 60_000, ("acme",))
    assert chat.price == Price(id="chat-v1", input="0.15", cached_input="0.075", output="0.6")
    assert chat.source_path == chat.tokenizer_path == str(tmp_path / "models" / "chat")
    adapter = catalogue.adapters[AdapterName("chat-acme")]
    assert (adapter.base, adapter.tenant) == ("chat", "acme")
    assert catalogue.generation == 0


def test_a_sharing_group_takes_both_sides(tmp_path: Path) -> None:
    """acme chose the group and is listed; globex is listed only, and has no group."""
    text = GOOD.replace("    weight: 2\n", "    weight: 2\n    sharing_group: helpers\n") + GROUP
    catalogue = assembled(text, write_models(tmp_path))
    group = catalogue.sharing_group_of(TenantId("acme"))
    assert group is not None
    assert (group.name, group.tenants, group.prompts) == ("helpers", ("acme", "globex"), ("You are helpful.",))
    assert catalogue.sharing_group_of(TenantId("globex")) is None


def test_a_sharing_group_names_what_there_is(tmp_path: Path) -> None:
    """An unknown group at the tenant, an unknown tenant in the group: two problems."""
    text = GOOD.replace("    weight: 2\n", "    weight: 2\n    sharing_group: other\n") + GROUP.replace(
        "globex", "nobody"
    )
    with pytest.raises(DeclarationRefused) as refused:
        assembled(text, write_models(tmp_path))
    assert [problem.reason for problem in refused.value.problems] == [
        "there is no sharing group `other`",
        "there is no tenant `nobody`",
    ]


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    """Invariant 10: what loaders will compute from their copies."""
    catalogue = assembled(GOOD, write_models(tmp_path))
    assert catalogue.models[CHAT].digest == version_digest(tmp_path / "models" / "chat")
    assert catalogue.models[TAGGER].digest == version_digest(tmp_path / "models" / "tagger.onnx")


def test_automatic_sizes_add_weights_cache_and_workspace(tmp_path: Path) -> None:
    """32 float16 elements are computed with as float32; 100 tokens of cache; a fixed workspace."""
    catalogue = assembled(GOOD, write_models(tmp_path))
    assert catalogue.models[CHAT].device_bytes == 32 * 4 + 100 * KV_BYTES_PER_TOKEN + WORKSPACE_BYTES
    assert catalogue.models[TAGGER].device_bytes == 64 * 1024 * 1024  # as declared


def test_other_engines_keep_weights_as_they_are_stored(tmp_path: Path) -> None:
    """vLLM: 32 × 2 bytes, and a cache of half the size; a file for ONNX counts as it is."""
    write_models(tmp_path)
    vllm = SizedVersion(tmp_path / "models" / "chat", Engine.VLLM, 100)
    assert device_bytes(vllm) == 32 * 2 + 100 * KV_BYTES_PER_TOKEN // 2 + WORKSPACE_BYTES
    # The sides of the 7 projections of each of 3 layers; 2 slots of rank 8 for 5, 2 bytes.
    room = device_bytes(replace(vllm, adapter_slots=2, adapter_rank_max=5)) - device_bytes(vllm)
    shape = base_shape(CONFIG)
    assert shape is not None
    assert room == 2 * 8 * sum(outputs + inputs for outputs, inputs in shape.projections.values()) * 3 * 2
    onnx = SizedVersion(tmp_path / "models" / "tagger.onnx", Engine.ONNX, 0)
    assert device_bytes(onnx) == 1_000 + WORKSPACE_BYTES


def test_the_estimator_is_the_callers(tmp_path: Path) -> None:
    """An engine that knows better replaces the estimate; declared sizes are not estimated."""
    seen: list[SizedVersion] = []

    def estimate(version: SizedVersion) -> int:
        seen.append(version)
        return 7

    declaration = parse(GOOD, "c.yaml", write_models(tmp_path))
    catalogue = assemble(declaration, FileReading(DigestCache(), estimate))
    assert catalogue.models[CHAT].device_bytes == 7
    assert seen == [SizedVersion(tmp_path / "models" / "chat", Engine.REFERENCE, 100)]


def test_context_and_cache_have_defaults_from_the_checkpoint(tmp_path: Path) -> None:
    """64 positions; the cache holds a full context for each of the 2 slots."""
    text = GOOD.replace("    memory: {device: auto, kv_pool_tokens: 100}\n", "")
    chat = assembled(text, write_models(tmp_path)).models[CHAT]
    assert (chat.context_tokens, chat.kv_pool_tokens) == (64, 2 * 64)


def test_no_more_context_than_the_model_has_positions(tmp_path: Path) -> None:
    """A promise that the weights cannot keep is refused."""
    text = GOOD.replace("    slots: 2", "    slots: 2\n    context_tokens: 65")
    with pytest.raises(DeclarationRefused, match="more than the model's 64 positions"):
        assembled(text, write_models(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, (5).to_bytes(8, "little") + b"nojsn", (2).to_bytes(8, "little") + b"[]"]
)
def test_broken_weights_are_refused_at_their_path(tmp_path: Path, content: bytes) -> None:
    """B44: a cut or foreign weights file is told with its place, and every such file at once."""
    write_models(tmp_path)
    checkpoint(tmp_path / "models" / "second")
    for name in ("chat", "second"):
        (tmp_path / "models" / name / "model.safetensors").write_bytes(content)
    text = GOOD.replace(
        "adapters:", "  - name: second\n    source: {path: models/second}\n    engine: reference\nadapters:"
    )
    with pytest.raises(DeclarationRefused) as caught:
        assembled(text, tmp_path)
    assert [problem.place.line for problem in caught.value.problems] == [12, 25]
    assert all("is not a safetensors file" in problem.reason for problem in caught.value.problems)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        json.dumps({**CONFIG, "max_position_embeddings": "many"}),
        json.dumps({**CONFIG, "num_hidden_layers": 0}),
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, config: str) -> None:
    """B44: config.json that is no JSON, no map, or lacks what sizes need."""
    write_models(tmp_path)
    (tmp_path / "models" / "chat" / "config.json").write_text(config)
    with pytest.raises(DeclarationRefused, match=r"config\.json"):
        assembled(GOOD, tmp_path)


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    """There is nothing to load."""
    write_models(tmp_path)
    (tmp_path / "models" / "chat" / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="no safetensors files"):
        assembled(GOOD, tmp_path)
