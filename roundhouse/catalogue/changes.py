"""What differs between two generations: what an operator is told, and what decides whether there is a new one. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from roundhouse.catalogue.records import Catalogue


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was added, changed or removed."""

    action: str  # "added", "changed" or "removed"
    kind: str  # "tenant", "model", "adapter", "sharing group" or "pin"
    name: str
    fields: tuple[str, ...] = ()  # of a changed thing


def changes_between(before: Catalogue, after: Catalogue) -> tuple[Change, ...]:
    """Every difference but the generation number, by kind and name. O(names)."""
    return (
        *_changes("tenant", before.tenants, after.tenants),
        *_changes("model", before.models, after.models),
        *_changes("adapter", before.adapters, after.adapters),
        *_changes("sharing group", before.sharing_groups, after.sharing_groups),
        *_changes("pin", before.pins, after.pins),
    )


def _changes(kind: str, before: Mapping[Any, msgspec.Struct], after: Mapping[Any, msgspec.Struct]) -> Iterator[Change]:
    for name in sorted({*before, *after}):
        if name not in before:
            yield Change("added", kind, name)
        elif name not in after:
            yield Change("removed", kind, name)
        elif before[name] != after[name]:
            yield Change("changed", kind, name, _fields(before[name], after[name]))


def _fields(before: msgspec.Struct, after: msgspec.Struct) -> tuple[str, ...]:
    names = before.__struct_fields__
    return tuple(name for name in names if getattr(before, name) != getattr(after, name))
