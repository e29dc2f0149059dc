"""pydantic's errors as reasons that an operator can act on: the key, what it must be, and what was meant instead."""

from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from roundhouse.catalogue.problems import Problem
from roundhouse.catalogue.yaml_document import Document, Path

_MUST_BE = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a map with keys",
    "dict_type": "a map with keys",
}


def explain(error: ValidationError, shape: type[BaseModel], document: Document, path: Path) -> list[Problem]:
    """One problem for each error below `path`, where the value of `shape` stands in the document."""
    return [_problem(detail, shape, document, path) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, shape: type[BaseModel], document: Document, path: Path) -> Problem:
    where = (*path, *detail["loc"])  # unions here are only "or nothing", which adds no parts of its own
    if detail["type"] == "extra_forbidden":
        return document.at_key(where, _unknown_key(str(where[-1]), detail["loc"], shape))
    if detail["type"] == "missing":
        return document.at_value(where[:-1], f"`{where[-1]}` is missing")
    return document.at_value(where, f"{_name(where)} {_must(detail)}")


def _unknown_key(key: str, location: tuple[str | int, ...], shape: type[BaseModel]) -> str:
    known = _known_keys(shape, location[:-1])
    near = get_close_matches(key, known, n=1)
    return f"unknown key `{key}`" + (f", did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}")


def _known_keys(shape: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    for part in location:
        fields = {field.alias or name: field for name, field in shape.model_fields.items()}
        if part in fields:
            shape = _model_in(fields[str(part)].annotation) or shape
    return [field.alias or name for name, field in shape.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def _name(where: Path) -> str:
    keys = [str(part) for part in where if isinstance(part, str)]
    return f"`{keys[-1]}`" if keys else "the file"


def _must(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind]}, not {_kind_of(detail['input'])}"
    match kind:
        case "greater_than_equal":
            return "must not be negative" if context["ge"] == 0 else f"must be at least {context['ge']}"
        case "greater_than":
            return f"must be more than {context['gt']:g}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}"
        case "literal_error":
            return f"must be {context['expected']}, not {_shown(detail['input'])}"
        case "string_pattern_mismatch":
            return _pattern_reason(detail["input"], context["pattern"])
        case "value_error":
            return str(context["error"])
    return detail["msg"][0].lower() + detail["msg"][1:]


def _pattern_reason(value: object, pattern: str) -> str:
    if pattern.startswith("^[A-Z]{3}"):
        return f"must be a currency code such as USD, not {_shown(value)}"
    return f"must be 1 to 128 letters, digits, `.`, `_` or `-`, beginning with a letter or digit, not {_shown(value)}"


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return f"{str(value).lower()} (in quotes it would be text)"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {_shown(value)}"
        case list():
            return "a list"
    return "a map"


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
