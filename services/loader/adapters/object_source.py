"""Versions in an S3-compatible store or behind an HTTP server that takes ranges, through obstore.

`s3://bucket/prefix` reads its credentials and endpoint from the usual AWS_* variables; `http(s)://host/path` cannot
list, so the catalogue must name the files; a token that the loader has for a host goes to that host only, over TLS
only. The source is not trusted: every file is hashed on the way to disk. A request that brings nothing within the limit
is an error, after the library's own retries (docs/decisions/0045-sources.md, 0126-addresses-in-the-catalogue.md).
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import HTTPStore, ObjectStore, S3Store

from roundhouse.catalogue.records import ContentFile
from roundhouse.errors import InvalidInput, NotFound, Unavailable

RETRIES = 3  # a dropped connection is usual; a store that is away must be told soon
PART_BYTES = 1024 * 1024  # one request of a slow source must not outlast the stall limit: a slow line still gives 1 MiB

_ERRORS = (BaseError, OSError)  # the library raises Python's own FileNotFoundError, among others

Opener = Callable[[str], ObjectStore]


class ObjectSource:
    """`WeightSource` for addresses. One client a bucket or host, kept."""

    def __init__(
        self, stall_ms: int, open_store: Opener | None = None, *, tokens: Mapping[str, str] | None = None
    ) -> None:
        """`tokens`: host (with its port, if it has one) → bearer token."""
        self._stall = timedelta(milliseconds=stall_ms)
        self._tokens = tokens or {}
        self._open_store = open_store or self._by_scheme
        self._stores: dict[str, ObjectStore] = {}
        self._lock = Lock()

    def files(self, source: str) -> list[ContentFile]:
        """See `WeightSource.files`."""
        root, prefix = split_address(source)
        if root.startswith("http"):
            raise InvalidInput("an HTTP source cannot be listed: the catalogue must name the version's files")
        try:
            found = [meta for batch in obstore.list(self._store(root), prefix or None) for meta in batch]
        except _ERRORS as error:
            raise self._as_error(error, source) from error
        cut = len(prefix) + 1 if prefix else 0
        files = [ContentFile(name=str(meta["path"])[cut:], size=meta["size"], sha256="") for meta in found]
        if not files:
            raise NotFound(f"there is nothing at {source}")
        return sorted(files, key=lambda file: file.name)

    def open(self, source: str, file: ContentFile) -> "ObjectReader":
        """See `WeightSource.open`."""
        root, prefix = split_address(source)
        path = f"{prefix}/{file.name}" if prefix else file.name
        return ObjectReader(self._store(root), path, file.size, lambda error: self._as_error(error, source))

    def _store(self, root: str) -> ObjectStore:
        with self._lock:
            if root not in self._stores:
                self._stores[root] = self._open_store(root)
            return self._stores[root]

    def _by_scheme(self, root: str) -> ObjectStore:
        options: Any = {"timeout": self._stall, "connect_timeout": self._stall, "allow_http": True}
        retries: Any = {"max_retries": RETRIES, "retry_timeout": self._stall}
        if root.startswith("s3:"):
            return S3Store(urlsplit(root).netloc, client_options=options, retry_config=retries)
        options |= {"default_headers": headers} if (headers := headers_for(root, self._tokens)) else {}
        return HTTPStore.from_url(root, client_options=options, retry_config=retries)

    def _as_error(self, error: Exception, source: str) -> NotFound | Unavailable:
        if isinstance(error, NotFoundError | FileNotFoundError):
            return NotFound(f"there is no such object below {source}")
        seconds = self._stall.total_seconds()
        return Unavailable(f"{source} gave nothing within {seconds:g} s: {_first_line(error)}")


class ObjectReader:
    """`SourceReader` by range requests. It holds no connection of its own."""

    def __init__(
        self, store: ObjectStore, path: str, size: int, as_error: Callable[[Exception], NotFound | Unavailable]
    ) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._as_error = as_error

    def read_into(self, view: memoryview, offset: int) -> int:
        """See `SourceReader.read_into`."""
        wanted = min(len(view), self._size - offset)
        done = 0
        while done < wanted:
            length = min(PART_BYTES, wanted - done)
            try:
                part = memoryview(obstore.get_range(self._store, self._path, start=offset + done, length=length))
            except _ERRORS as error:
                raise self._as_error(error) from error
            if len(part) == 0:
                break
            view[done : done + len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        """See `SourceReader.close`."""


def headers_for(root: str, tokens: Mapping[str, str]) -> dict[str, str]:
    """What goes with every request to a server: the token for exactly this host, and never in plain text."""
    parts = urlsplit(root)
    token = tokens.get(parts.netloc) if parts.scheme == "https" else None
    return {"authorization": f"Bearer {token}"} if token else {}


def split_address(source: str) -> tuple[str, str]:
    """`scheme://authority` and the path below it without slashes around it. Raises InvalidInput."""
    parts = urlsplit(source)
    if not parts.netloc:
        raise InvalidInput(f"{source} names no host or bucket")
    return f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
