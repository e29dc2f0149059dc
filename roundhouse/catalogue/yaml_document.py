"""YAML text → plain data with the place of every key and value. No tags, no objects, no duplicate keys.

PyYAML's constructor keeps no places and lets a repeated key win silently, so the node graph is read here. Size, depth
and number of values are bounded: anchors may be used, but not to make a small file large.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml

from roundhouse.catalogue.problems import DeclarationRefused, Place, Problem

BYTES_MAX = 4 * 1024 * 1024  # 10,000 models of 400 bytes
VALUES_MAX = 500_000  # 10,000 models with 50 values each
DEPTH_MAX = 20  # the format needs 5

Path = tuple[str | int, ...]
"""How to reach a value: keys and list positions from the root."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class Document:
    """Plain data, and where it stands in the text."""

    file: str
    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def at_value(self, path: Path, reason: str) -> Problem:
        """A problem at a value, or at the nearest thing around it that is there."""
        return Problem(self.file, self._nearest(self.values, path), reason)

    def at_key(self, path: Path, reason: str) -> Problem:
        """A problem at a key itself."""
        return Problem(self.file, self.keys.get(path) or self._nearest(self.values, path), reason)

    @staticmethod
    def _nearest(places: dict[Path, Place], path: Path) -> Place:
        candidates = (path[:length] for length in range(len(path), -1, -1))
        return next((places[candidate] for candidate in candidates if candidate in places), Place())


def read_yaml(text: str, file: str) -> Document:
    """Read one document; repeated keys are in `problems`. Raises DeclarationRefused if nothing can be read at all."""
    document = Document(file)
    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise DeclarationRefused([Problem(file, Place(), f"the file is larger than {BYTES_MAX} bytes")])
    root = _compose(text, file)
    if root is None:
        raise DeclarationRefused([Problem(file, Place(), "the file is empty")])
    document.data = _Reading(document).value(root, ())
    return document


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise DeclarationRefused([Problem(file, _place(mark), f"not YAML: {reason}")]) from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise DeclarationRefused([Problem(file, Place(), f"not YAML: {_first_line(error)}")]) from error
    except RecursionError as error:
        raise DeclarationRefused([Problem(file, Place(), "nested too deeply")]) from error
    return node


class _Reading:
    """One walk over the node graph; aliases are followed again each time, so the walk itself is what is bounded."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._scalars = yaml.constructor.SafeConstructor()
        self._values_left = VALUES_MAX

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Plain data of a node. Raises DeclarationRefused where a bound is passed."""
        self._document.values[path] = _place(node.start_mark)
        self._values_left -= 1
        if self._values_left < 0:
            self._refuse(node, f"more than {VALUES_MAX} values")
        if len(path) > DEPTH_MAX:
            self._refuse(node, "nested too deeply")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node.value, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, pairs: Iterable[tuple[yaml.Node, yaml.Node]], path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in pairs:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be text")
                continue
            key = str(key_node.value)
            if key in found:
                self._problem(key_node, f"the key `{key}` is here twice")
                continue
            self._document.keys[(*path, key)] = _place(key_node.start_mark)
            found[key] = self.value(value_node, (*path, key))
        return found

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        if node.tag not in _PLAIN_TAGS:
            self._problem(node, f"the tag {node.tag} is not allowed")
            return node.value  # text, so that the tag is the one problem of it
        if node.tag == _TIMESTAMP_TAG:
            return node.value  # a date is text here
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            self._problem(node, f"not a value: {_first_line(error)}")
            return None

    def _problem(self, node: yaml.Node, reason: str) -> None:
        self._document.problems.append(Problem(self._document.file, _place(node.start_mark), reason))

    def _refuse(self, node: yaml.Node, reason: str) -> None:
        raise DeclarationRefused([Problem(self._document.file, _place(node.start_mark), reason)])


_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "timestamp"))


def _place(mark: Any) -> Place:
    return Place() if mark is None else Place(mark.line + 1, mark.column + 1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
