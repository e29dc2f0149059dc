"""Sources that are addresses: which ones loaders can fetch from, and what a declaration must say of such a source.

Nothing is fetched when a declaration is applied: an address may hold a hundred gigabytes, and the gateway may not reach
it. So the declaration lists the files with their hashes (`roundhouse files FOLDER` prints the list), and what is
otherwise read from files is declared. Credentials are never part of an address: loaders take them from their
environment. Decision: docs/decisions/0126-addresses-in-the-catalogue.md.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

from roundhouse.catalogue.problems import Problem
from roundhouse.catalogue.shape import AdapterShape, ModelShape, interface_of
from roundhouse.catalogue.yaml_document import Document
from roundhouse.catalogue.yaml_document import Path as Where

SCHEMES = ("http", "https", "s3")


def wrong_address(document: Document, where: Where, item: ModelShape | AdapterShape) -> Iterator[Problem]:
    """Everything that is wrong with an item whose source is an address."""
    source = (*where, "source")
    reason = _wrong_text(item.source.path)
    if reason:
        yield document.at_value((*source, "path"), reason)
    if not item.source.files:
        yield document.at_value(source, "`files` is missing: an address needs its files with size and sha256")
    names = [file.name for file in item.source.files]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield document.at_value((*source, "files", index, "name"), f"the file `{name}` is listed twice")
    if isinstance(item, ModelShape):
        yield from _undeclared(document, where, item)


def _undeclared(document: Document, where: Where, model: ModelShape) -> Iterator[Problem]:
    """What would be read from the files if they were here."""
    if model.memory.device == "auto":
        yield document.at_value(where, "`memory.device` is missing: nothing here tells the size of an address")
    if interface_of(model) != "llm":
        return
    if model.context_tokens is None:
        yield document.at_value(where, "`context_tokens` is missing: nothing here tells it for an address")
    if model.tokenizer is None:
        yield document.at_value(where, "`tokenizer` is missing: gateways read it from a path")


def _wrong_text(address: str) -> str:
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError as error:
        return f"not an address: {error}"
    if parts.scheme not in SCHEMES:
        return f"no loader knows the scheme `{parts.scheme}`: there are {', '.join(SCHEMES)}, and paths"
    if parts.username is not None or parts.password is not None:
        return "an address must not hold credentials: loaders take them from their environment"
    if parts.query or parts.fragment:
        return "an address ends with its path: no query, which may hold credentials, and no fragment"
    if not parts.hostname:
        return "the address names no host or bucket"
    return ""
