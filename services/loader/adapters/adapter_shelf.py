"""Adapters in host memory: a folder on a memory file system, with one folder for each adapter.

    FOLDER/<hex of the digest>/…     a whole copy of what the disk cache verified
    FOLDER/new-…  old-…              being made, being deleted; thrown away at start

Engines open paths, and an adapter has kilobytes: a range of the arena, at a huge page each, would waste most of it.
What an earlier process left under a final name is whole; the engine's own check of the digest is the last word.
"""

import asyncio
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import structlog

from roundhouse.errors import InvalidInput, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters.cache_manifest import hex_of

log = structlog.get_logger(__name__)


class MemoryShelf:
    """`AdapterShelf` in a folder that this process has for itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def start(self) -> Mapping[Digest, int]:
        """See `AdapterShelf.start`."""
        return await asyncio.to_thread(self._start)

    def path(self, digest: Digest) -> Path:
        """See `AdapterShelf.path`."""
        return self._folder / hex_of(digest)

    async def put(self, digest: Digest, source: Path) -> None:
        """See `AdapterShelf.put`."""
        await asyncio.to_thread(self._put, digest, source)

    async def remove(self, digest: Digest) -> None:
        """See `AdapterShelf.remove`."""
        await asyncio.to_thread(self._remove, self.path(digest))

    def _start(self) -> dict[Digest, int]:
        found: dict[Digest, int] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self._folder.iterdir()):
                digest = Digest(f"sha256:{path.name}")
                try:
                    hex_of(digest)
                except InvalidInput:
                    log.info("shelf_leftover_removed", name=path.name)
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                found[digest] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        except OSError as error:
            raise Unavailable(f"the folder {self._folder} cannot be used: {error.strerror}") from error
        return found

    def _put(self, digest: Digest, source: Path) -> None:
        target, fresh = self.path(digest), self._folder / f"new-{uuid.uuid4().hex}"
        if target.exists():
            return
        try:
            shutil.copytree(source, fresh, copy_function=shutil.copyfile)
            fresh.rename(target)
        except OSError as error:
            raise Unavailable(f"{self._folder} takes no copy: {error}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """So that half a folder never has a final name."""
        gone = self._folder / f"old-{uuid.uuid4().hex}"
        try:
            path.rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)
