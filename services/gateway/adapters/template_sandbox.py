"""Jinja for chat templates, which come with models and are programs of strangers: no reach, a bound on time and size.

On top of Jinja's immutable sandbox every loop's turn and every call looks at the clock, and whatever makes text or
lists longer by multiplying, joining or padding is bounded, so that a template ends within `RENDER_S_MAX` and cannot
fill the memory. Source of what templates expect: Hugging Face, "Chat templates" (`raise_exception`, `strftime_now`,
`tojson`).
"""

import datetime
import functools
import json
import re
import threading
import time
from typing import Any

from jinja2 import Template, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_S_MAX = 2.0  # a guess: a long conversation takes milliseconds
PROMPT_CHARACTERS_MAX = 16 * 1024 * 1024
NUMBER_MAX = 1_000_000  # an argument of a call: widths, counts and ranges beyond it only waste memory
_WIDE = re.compile(r"\d{7}")  # a width in a format that is above `NUMBER_MAX`
_SIZED = (str, bytes, list, tuple)


class TemplateRefusal(Exception):
    """A template called `raise_exception`; the text is the model author's, for the caller."""


class TemplateTooLong(Exception):
    """A template took more time or made more text than it may."""


class _Deadline(threading.local):
    at: float = float("inf")  # monotonic


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """See the module. Rendering is safe from several threads."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self._deadline = _Deadline()
        self.filters = {name: _sized_filter(name, made) for name, made in self.filters.items()}
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["_turn"] = self._turn
        self.globals["_joined"] = self._joined

    def bounded(self, template: Template, values: dict[str, Any]) -> str:
        """Render. Raises TemplateRefusal, TemplateTooLong, and whatever a template may raise."""
        self._deadline.at = time.monotonic() + RENDER_S_MAX
        try:
            pieces: list[str] = []
            size = 0
            for piece in template.generate(values):
                size += len(piece)
                if size > PROMPT_CHARACTERS_MAX:
                    raise TemplateTooLong
                pieces.append(piece)
            return "".join(pieces)
        finally:
            self._deadline.at = float("inf")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_call("_turn", [])))
        _replace_joins(tree)
        tree.set_environment(self)
        return tree

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template: within the time, and not with endless numbers."""
        self._turn()
        owner = getattr(__obj, "__self__", None)
        _check_arguments(getattr(__obj, "__name__", ""), owner, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply, raise or add, within bounds."""
        self._turn()
        if operator == "**":
            raise TemplateTooLong  # no template needs powers, and one may take for ever
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateTooLong
        if operator == "*" and isinstance(left, _SIZED) | isinstance(right, _SIZED):
            sized, times = (left, right) if isinstance(left, _SIZED) else (right, left)
            if len(sized) * max(0, int(times)) > NUMBER_MAX:
                raise TemplateTooLong
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _turn(self) -> str:
        if time.monotonic() > self._deadline.at:
            raise TemplateTooLong
        return ""

    def _joined(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def _check_arguments(name: str, owner: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse what would make an endless text of short ones: wide paddings and formats, replacements that multiply."""
    if any(isinstance(value, int) and abs(value) > NUMBER_MAX for value in arguments):
        raise TemplateTooLong
    texts = [value for value in (owner, *arguments) if isinstance(value, str)]
    if name in ("format", "format_map") and any(_WIDE.search(text) for text in texts):
        raise TemplateTooLong
    if name == "replace" and len(texts) == 3:
        text, old, new = texts
        _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _sized_filter(name: str, made: Any) -> Any:
    @functools.wraps(made)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        plain = tuple(value for value in args if isinstance(value, str | int))
        owner, rest = (plain[0], plain[1:]) if plain else (None, ())
        _check_arguments(name, owner, (*rest, *kwargs.values()))
        result = made(*args, **kwargs)
        if isinstance(result, str):
            _check_size(len(result))
        return result

    return bounded


def _check_size(size: int) -> None:
    if size > PROMPT_CHARACTERS_MAX:
        raise TemplateTooLong


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)


def _replace_joins(node: nodes.Node) -> None:
    """Put `_joined(a, b)` where a template says `a ~ b`."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            for place, child in enumerate(value):
                if isinstance(child, nodes.Node):
                    value[place] = _without_join(child)
        elif isinstance(value, nodes.Node):
            setattr(node, field, _without_join(value))


def _without_join(node: nodes.Node) -> nodes.Node:
    _replace_joins(node)
    return _call("_joined", node.nodes) if isinstance(node, nodes.Concat) else node


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change prompts.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)
