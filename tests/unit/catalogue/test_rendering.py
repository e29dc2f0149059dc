"""What `roundhouse get` prints is what `roundhouse apply` takes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from roundhouse.catalogue import shape
from roundhouse.catalogue.records import Catalogue, SharingGroup, Tenant
from roundhouse.catalogue.rendering import declaration_of
from roundhouse.cli.admin_output import as_json, as_yaml
from roundhouse.vocabulary import TenantId
from tests.unit.catalogue.files import GOOD, write_models
from tests.unit.catalogue.test_assembly import assembled

EVERY_KEY = """\
version: 1
tenants:
  - name: acme
    weight: 2.5
    class: interactive
    limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrent_requests: 0, queued_requests: 9,
             queued_tokens: 8}
    limits_per_model:
      - {model: "cha*", requests_per_minute: 1, tokens_per_minute: 2, concurrent_requests: 3, queued_requests: 4,
         queued_tokens: 5, budget: {amount: 20.25, currency: EUR, period: day}}
    budget: {amount: 100.50, currency: EUR, period: day}
    isolation: dedicated-replica
    fallback: true
    models: ["chat*", "far"]
    usage_retention_days: 400
    sharing_group: helpers
  - name: "007"
models:
  - name: chat
    source: {path: models/chat}
    engine: vllm
    interface: llm
    slots: 2
    adapter_slots: 1
    adapter_rank_max: 32
    memory: {device: 64MiB, kv_pool_tokens: 100}
    tensor_parallel: 2
    fallback: far
    context_tokens: 32
    tokenizer: models/chat/tokenizer.json
    pool: fast
    slo: {time_to_first_token_ms: 500, cold_start_ms: 7000}
    residency: {pinned: true, min_replicas: 1}
    access: {tenants: [acme, "007"]}
    tenant_limits: {requests_per_minute: 120, budget: {amount: "1"}}
    price: {id: chat-v1, input: 0.15, cached_input: "0.075", output: 0.60, currency: EUR}
    prices:
      - {id: chat-batch, class: batch, input: 0.075}
      - {id: chat-v2, from: 2026-12-01, input: 0.14}
      - {id: chat-v3, from: "2026-12-01T12:00:00.250+02:00"}
  - name: far
    source:
      path: s3://models/far
      files: [{name: config.json, size: 2, sha256: "DIGEST"}, {name: a/b.safetensors, size: 0, sha256: "DIGEST"}]
    engine: reference
    memory: {device: 1GiB}
    context_tokens: 64
    tokenizer: models/chat
adapters:
  - name: chat-acme
    base: chat
    source: {path: adapters/chat-acme}
    base_digest: "BASE"
    tenant: acme
    price: {input: 1}
    prices: [{id: b, class: batch}]
  - name: chat-everybody
    base: chat
    source: {path: adapters/chat-acme}
sharing_groups:
  - name: helpers
    tenants: [acme, "007"]
    prompts: ["You are helpful: yes\\n# no", "ünï\\t"]
""".replace("DIGEST", "0f" * 32)


def whole(root: Path) -> str:
    """`EVERY_KEY`, with the digest that the base has."""
    write_models(root)
    base = assembled(EVERY_KEY.replace('    base_digest: "BASE"\n', ""), root).models
    return EVERY_KEY.replace("BASE", next(iter(base.values())).digest)


@pytest.mark.parametrize("written", [as_yaml, as_json])
@pytest.mark.parametrize("declared", ["every key", "defaults"])
def test_what_is_shown_makes_the_same_catalogue(
    tmp_path: Path, written: Callable[[object], str], declared: str
) -> None:
    """Every kind and key, from another folder than the first file's; as YAML and as JSON."""
    before = assembled(whole(tmp_path) if declared == "every key" else GOOD, write_models(tmp_path / "again"))
    after = assembled(written(declaration_of(before)), tmp_path / "nowhere")
    assert after == before


def test_no_key_of_the_format_is_forgotten() -> None:
    """A key that is new to the format has to be in `EVERY_KEY`, and so in what is shown."""
    used = set(_keys(yaml.safe_load(EVERY_KEY)))
    shapes = [each for each in vars(shape).values() if isinstance(each, type) and issubclass(each, shape.Shape)]
    assert {key for each in shapes for key in _names(each)} - used == set()


def test_what_was_left_to_the_files_is_left_to_them_again(tmp_path: Path) -> None:
    """GOOD's chat says kv_pool_tokens but neither device memory, context nor tokenizer; its tagger has a size."""
    chat, tagger = declaration_of(assembled(GOOD, write_models(tmp_path)))["models"]
    assert chat["memory"] == {"device": "auto", "kv_pool_tokens": 100}
    assert not {"context_tokens", "tokenizer"} & set(chat)
    assert tagger["memory"] == {"device": 64 * 2**20}


@example(["\x85", "\u2028 ü", "\x7f", "\ufeff", "🚂"])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=3))
def test_any_prompt_survives(prompts: list[str]) -> None:
    """Line ends, colons, control characters: the text that was declared is the text that is applied again."""
    tenant = Tenant(name=TenantId("t"))
    group = SharingGroup(name="g", tenants=(tenant.name,), prompts=tuple(prompts))
    before = Catalogue(tenants={tenant.name: tenant}, sharing_groups={"g": group})
    assert assembled(as_yaml(declaration_of(before)), Path()) == before
    assert assembled(as_json(declaration_of(before)), Path()) == before


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name


def _keys(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        yield from data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _keys(item)
