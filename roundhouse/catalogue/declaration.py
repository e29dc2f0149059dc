"""A declaration checked as far as text and file system allow, without reading weights.

All problems are found at once and nothing is changed: what was applied before stays until a file is right as a whole
(case B44). `assembly` makes a catalogue of it. Format: docs/operators/catalogue.md.
"""

import os.path
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from roundhouse.catalogue.addresses import wrong_address
from roundhouse.catalogue.explain import explain
from roundhouse.catalogue.problems import DeclarationRefused, Problem
from roundhouse.catalogue.shape import (
    LLM_ENGINES,
    AdapterShape,
    FileShape,
    ModelShape,
    Shape,
    SharingGroupShape,
    TenantShape,
    interface_of,
)
from roundhouse.catalogue.yaml_document import Document, read_yaml
from roundhouse.catalogue.yaml_document import Path as Where

Item = TypeVar("Item", bound=Shape)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A checked file. `base_dir` is what relative paths are relative to."""

    document: Document
    base_dir: Path
    tenants: dict[Where, TenantShape] = field(default_factory=dict)
    models: dict[Where, ModelShape] = field(default_factory=dict)
    adapters: dict[Where, AdapterShape] = field(default_factory=dict)
    sharing_groups: dict[Where, SharingGroupShape] = field(default_factory=dict)

    def path_of(self, text: str) -> Path:
        """An absolute path; links are kept, `..` is resolved by name."""
        return Path(os.path.abspath(self.base_dir / text))

    def model(self, name: str | None) -> ModelShape | None:
        """A model of the file by its name. O(models)."""
        return next((each for each in self.models.values() if each.name == name), None)

    def refuse_at(self, where: Where, reason: str) -> Problem:
        """A problem that was found later, for example while files were read."""
        return self.document.at_value(where, reason)


def parse(text: str, file: str, base_dir: Path) -> Declaration:
    """Check a declaration. `file` is its name in problems. Raises DeclarationRefused with every problem."""
    document = read_yaml(text, file)
    problems = list(document.problems)
    try:
        whole = FileShape.model_validate(document.data)
    except ValidationError as error:
        problems += explain(error, FileShape, document, ())
        whole = _lists_only(document.data)
    declaration = Declaration(
        document,
        base_dir,
        _items(whole.tenants, "tenants", TenantShape, document, problems),
        _items(whole.models, "models", ModelShape, document, problems),
        _items(whole.adapters, "adapters", AdapterShape, document, problems),
        _items(whole.sharing_groups, "sharing_groups", SharingGroupShape, document, problems),
    )
    problems += _duplicates(document)
    problems += _unknown_references(declaration)
    problems += _wrong_files(declaration)
    problems += _wrong_interfaces(declaration)
    if problems:
        raise DeclarationRefused(problems)
    return declaration


def _lists_only(data: Any) -> FileShape:
    """The lists of a file whose other keys are wrong, so that their problems are found in the same round."""
    found = data if isinstance(data, dict) else {}
    sections = ("tenants", "models", "adapters", "sharing_groups")
    lists = {key: found[key] for key in sections if isinstance(found.get(key), list)}
    return FileShape.model_validate({"version": 1, **lists})


def _items(
    raw: list[Any], section: str, shape: type[Item], document: Document, problems: list[Problem]
) -> dict[Where, Item]:
    found: dict[Where, Item] = {}
    for index, item in enumerate(raw):
        where: Where = (section, index)
        try:
            found[where] = shape.model_validate(item)
        except ValidationError as error:
            problems += explain(error, shape, document, where)
    return found


def _names(document: Document, section: str) -> Iterator[tuple[str, Where]]:
    """Every name of a section, of wrong items too: who refers to such an item made no mistake of his own."""
    items = document.data.get(section) if isinstance(document.data, dict) else None
    for index, item in enumerate(items if isinstance(items, list) else []):
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            yield item["name"], (section, index, "name")


def _duplicates(document: Document) -> Iterator[Problem]:
    # Models and adapters are called by the same names.
    for sections in (("tenants",), ("sharing_groups",), ("models", "adapters")):
        seen: dict[str, Where] = {}
        for section in sections:
            for name, where in _names(document, section):
                if name in seen:
                    first = document.values[seen[name]]
                    yield document.at_value(where, f"the name `{name}` is taken by line {first.line}")
                else:
                    seen[name] = where


def _unknown_references(declaration: Declaration) -> Iterator[Problem]:
    document = declaration.document
    tenants = {name for name, _ in _names(document, "tenants")}
    models = {name for name, _ in _names(document, "models")}
    for where, model in declaration.models.items():
        for index, tenant in enumerate(model.access.tenants):
            if tenant != "*" and tenant not in tenants:
                yield document.at_value((*where, "access", "tenants", index), f"there is no tenant `{tenant}`")
    for where, model in declaration.models.items():
        if model.fallback is not None and (model.fallback not in models or model.fallback == model.name):
            yield document.at_value((*where, "fallback"), f"there is no other model `{model.fallback}`")
    groups = {name for name, _ in _names(document, "sharing_groups")}
    for where, customer in declaration.tenants.items():
        if customer.sharing_group is not None and customer.sharing_group not in groups:
            yield document.at_value((*where, "sharing_group"), f"there is no sharing group `{customer.sharing_group}`")
    for where, group in declaration.sharing_groups.items():
        for index, tenant in enumerate(group.tenants):
            if tenant not in tenants:
                yield document.at_value((*where, "tenants", index), f"there is no tenant `{tenant}`")
    for where, adapter in declaration.adapters.items():
        if adapter.tenant is not None and adapter.tenant not in tenants:
            yield document.at_value((*where, "tenant"), f"there is no tenant `{adapter.tenant}`")
        if adapter.base not in models:
            yield document.at_value((*where, "base"), f"there is no model `{adapter.base}`")


def _wrong_files(declaration: Declaration) -> Iterator[Problem]:
    document = declaration.document
    items: dict[Where, ModelShape | AdapterShape] = {**declaration.models, **declaration.adapters}
    for where, item in items.items():
        if item.source.is_address:
            yield from wrong_address(document, where, item)
            if isinstance(item, ModelShape) and item.tokenizer is not None:
                yield from _wrong_tokenizer(declaration, where, item.tokenizer)
            continue
        if item.source.files:
            yield document.at_value((*where, "source", "files"), "a path needs no list: its files are read")
        path = declaration.path_of(item.source.path)
        if not path.exists():
            yield document.at_value((*where, "source", "path"), f"there is no {path}")
        elif isinstance(item, ModelShape):
            yield from _wrong_model_files(declaration, where, item, path)


def _wrong_model_files(declaration: Declaration, where: Where, model: ModelShape, path: Path) -> Iterator[Problem]:
    document = declaration.document
    if model.engine in LLM_ENGINES and not (path / "config.json").is_file():
        yield document.at_value((*where, "source", "path"), f"there is no config.json in {path}")
    if model.tokenizer is not None:
        yield from _wrong_tokenizer(declaration, where, model.tokenizer)
    elif model.engine in LLM_ENGINES and not (path / "tokenizer.json").is_file():
        yield document.at_value((*where, "source", "path"), f"there is no tokenizer.json in {path}")


def _wrong_tokenizer(declaration: Declaration, where: Where, text: str) -> Iterator[Problem]:
    tokenizer = declaration.path_of(text)
    if not tokenizer.is_file() and not (tokenizer / "tokenizer.json").is_file():
        yield declaration.document.at_value((*where, "tokenizer"), f"there is no tokenizer.json in {tokenizer}")


def _wrong_interfaces(declaration: Declaration) -> Iterator[Problem]:
    document = declaration.document
    language_models = {model.name for model in declaration.models.values() if interface_of(model) == "llm"}
    without_room = {m.name for m in declaration.models.values() if m.engine == "vllm" and not m.adapter_slots}
    others = {model.name for model in declaration.models.values()} - language_models
    for where, model in declaration.models.items():
        interface = interface_of(model)
        if model.engine in LLM_ENGINES and interface != "llm":
            yield document.at_value((*where, "interface"), f"the engine `{model.engine}` is called as `llm`")
        if model.engine == "onnx" and interface != "tensors":
            yield document.at_value((*where, "interface"), "the engine `onnx` is called as `tensors`")
        if model.adapter_slots and model.engine != "vllm":
            reason = "only `vllm` is told how many adapters to have room for; the others find it"
            yield document.at_value((*where, "adapter_slots"), reason)
        if model.adapter_slots > model.slots:
            reason = f"more adapters than the {model.slots} requests (`slots`) that run at once are never mixed"
            yield document.at_value((*where, "adapter_slots"), reason)
        fallback = declaration.model(model.fallback)
        if fallback is not None and interface_of(fallback) != interface:
            yield document.at_value((*where, "fallback"), f"the model `{fallback.name}` is called in another way")
        if model.engine == "triton" and interface == "llm" and model.context_tokens is None:
            yield document.at_value(where, "`context_tokens` is missing: nothing else tells it for a Triton folder")
    for where, adapter in declaration.adapters.items():
        if adapter.base in others:
            yield document.at_value((*where, "base"), f"the model `{adapter.base}` takes no adapters")
        if adapter.base in without_room:
            reason = f"the model `{adapter.base}` (vllm) has no room for adapters: give it `adapter_slots`"
            yield document.at_value((*where, "base"), reason)
