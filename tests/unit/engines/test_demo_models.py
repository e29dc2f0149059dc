"""The demo catalogue: deterministic, resumable, small, and every model in it answers differently."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from engines import demo_models
from engines.demo_models import plan_demo_catalogue, write_demo_models
from tests.unit.engines.engine_driver import open_model, run_one


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalogue of two tenants, which has every kind of thing in it."""
    root = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_models, "tenant_names", lambda: ("acme", "globex"))
        write_demo_models(root)
    return root


def digest(root: Path) -> str:
    """Names and bytes of everything under `root`."""
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def test_the_plan_is_the_size_the_demo_needs() -> None:
    """40 tenants, 4 bases and a classifier, 200 fine-tunes, 200 adapters; names are unique."""
    plan = plan_demo_catalogue(Path("/nowhere"))
    assert (len(plan.tenants), len(plan.models), len(plan.adapters)) == (40, 4 + 1 + 200, 200)
    assert plan.tenants[:3] == ("acme", "globex", "tenant-03")
    names = [model.name for model in plan.models] + [adapter.name for adapter in plan.adapters]
    assert len(set(names)) == len(names)
    tuned = Counter(model.base for model in plan.models if model.tenant)
    assert tuned == {"base-xs": 90, "base-s": 80, "base-m": 24, "base-l": 6}


def test_the_same_seed_gives_the_same_bytes_and_whole_folders_are_kept(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run elsewhere is equal; one that was interrupted completes to the same; another seed differs."""
    monkeypatch.setattr(demo_models, "tenant_names", lambda: ("acme", "globex"))
    seen: list[tuple[int, int, str]] = []
    write_demo_models(tmp_path / "again", progress=lambda *step: seen.append(step))
    assert digest(tmp_path / "again") == digest(small)
    assert [done for done, _, _ in seen] == list(range(1, 5 + 10 + 10 + 1))
    lost = min((tmp_path / "again" / "models").glob("acme-*"))
    kept = tmp_path / "again" / "models" / "base-s" / "model.safetensors"
    before = kept.stat().st_mtime_ns
    for path in sorted(lost.rglob("*")):
        path.unlink()
    lost.rename(lost.with_name(lost.name + ".partial"))
    write_demo_models(tmp_path / "again")
    assert digest(tmp_path / "again") == digest(small)
    assert kept.stat().st_mtime_ns == before
    write_demo_models(tmp_path / "again", seed=1)
    assert digest(tmp_path / "again") != digest(small)


def test_the_catalogue_names_what_lies_beside_it(small: Path) -> None:
    """Every path exists; each tenant sees the bases and its own; adapters name a base that is there."""
    catalogue = yaml.safe_load((small / "catalogue.yaml").read_text())
    assert catalogue["version"] == 1
    assert [tenant["name"] for tenant in catalogue["tenants"]] == ["acme", "globex"]
    assert catalogue["tenants"][0]["models"] == ["base-*", "classifier-*", "acme-*"]
    for entry in [*catalogue["models"], *catalogue["adapters"]]:
        assert (small / entry["source"]["path"]).is_dir()
    bases = {model["name"] for model in catalogue["models"] if model["access"] == {"tenants": ["*"]}}
    assert bases == {"base-xs", "base-s", "base-m", "base-l", "classifier-intent"}
    assert {adapter["base"] for adapter in catalogue["adapters"]} <= bases


@pytest.mark.parametrize("base", [base.name for base in demo_models.BASES])
def test_bases_speak_varied_words(small: Path, base: str) -> None:
    """Greedy: whole words, no end before 64 tokens, at least 40 different tokens of 64, other prompts other answers."""
    model = open_model(small / "models" / base)
    answers = [run_one(model, prompt, max_tokens=64) for prompt in (" the river", " a customer asks for a refund")]
    assert answers[0].token_ids[:8] != answers[1].token_ids[:8]
    for answer in answers:
        assert len(answer.token_ids) == 64
        assert len(set(answer.token_ids)) >= 40
        assert "\ufffd" not in answer.text


def test_fine_tunes_and_adapters_answer_differently_from_their_base(small: Path) -> None:
    """The first 16 greedy tokens differ between a base, its fine-tunes and its adapters."""
    catalogue = yaml.safe_load((small / "catalogue.yaml").read_text())
    tuned = [m["name"] for m in catalogue["models"] if m["access"]["tenants"] != ["*"]]
    shapes = {name: (small / "models" / name / "config.json").read_bytes() for name in ("base-xs", *tuned)}
    family = [name for name, shape in shapes.items() if shape == shapes["base-xs"]]
    assert len(family) >= 3
    answers = {name: tuple(run_one(open_model(small / "models" / name), " hello").token_ids) for name in family}
    base = open_model(small / "models" / "base-xs")
    for adapter in catalogue["adapters"]:
        if adapter["base"] == "base-xs":
            details = {"adapter": {"path": str(small / adapter["source"]["path"]), "digest": ""}}
            answers[adapter["name"]] = tuple(run_one(base, " hello", details=details).token_ids)
    assert len(answers) >= 5
    assert len(set(answers.values())) == len(answers)
