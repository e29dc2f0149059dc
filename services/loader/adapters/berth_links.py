"""Adapters as a vLLM instance finds them: links, one folder for each load.

    FOLDER/<triton name>/<name>.<count>.<rank>/<number>  ->  the adapter in host memory or in the disk cache
    FOLDER/<triton name>/<name>.<count>.<rank>/new-…         a link that is about to replace one

Links, because an adapter moves between host memory and disk while the path that vLLM was told stays. A link stays when
its adapter has left the node: its target's name still tells which adapter the number belongs to.
"""

import asyncio
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Digest
from services.loader.domain.berths import Berths

log = structlog.get_logger(__name__)

NAME_CHARACTERS = 12
_LOAD = re.compile(r"^([0-9a-f]{12})\.(\d+)\.(\d+)$")
_DIGEST = re.compile(r"^[0-9a-f]{64}$")


class BerthLinks:
    """`BerthBoard` in a folder that this process has for itself, and engines see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def start(self) -> Mapping[str, Berths]:
        """See `BerthBoard.start`."""
        return await asyncio.to_thread(self._start)

    async def open(self, triton_name: str, count: int, rank_max: int) -> Berths:
        """See `BerthBoard.open`."""
        return await asyncio.to_thread(self._open, triton_name, count, rank_max)

    async def point(self, berths: Berths, number: int, target: Path) -> None:
        """See `BerthBoard.point`."""
        await asyncio.to_thread(_point, Path(berths.folder), number, target)

    async def close(self, triton_name: str) -> None:
        """See `BerthBoard.close`."""
        await asyncio.to_thread(shutil.rmtree, self._folder / triton_name, ignore_errors=True)

    def _start(self) -> dict[str, Berths]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return {load.parent.name: berths for load in sorted(self._folder.glob("*/*")) if (berths := _read(load))}
        except OSError as error:
            raise Unavailable(f"the folder {self._folder} cannot be used: {error.strerror}") from error

    def _open(self, triton_name: str, count: int, rank_max: int) -> Berths:
        home = self._folder / triton_name
        shutil.rmtree(home, ignore_errors=True)
        name = uuid.uuid4().hex[:NAME_CHARACTERS]
        load = home / f"{name}.{count}.{rank_max}"
        try:
            load.mkdir(parents=True)
        except OSError as error:
            raise Unavailable(f"the folder {load} cannot be made: {error.strerror}") from error
        return Berths(name, str(load), count, rank_max)


def _read(load: Path) -> Berths | None:
    match = _LOAD.match(load.name)
    if match is None:
        log.info("berths_leftover_ignored", name=load.name)
        return None
    return Berths(match[1], str(load), int(match[2]), int(match[3]), dict(_taken(load)))


def _taken(load: Path) -> Iterator[tuple[Digest, int]]:
    for link in load.iterdir():
        if not link.name.isdigit():
            link.unlink(missing_ok=True)  # its process died before it had its name
            continue
        target = link.readlink()
        yield Digest(f"sha256:{next(part for part in reversed(target.parts) if _DIGEST.match(part))}"), int(link.name)


def _point(folder: Path, number: int, target: Path) -> None:
    link, fresh = folder / str(number), folder / f"new-{uuid.uuid4().hex}"
    try:
        if link.is_symlink() and link.readlink() == target:
            return
        fresh.symlink_to(target, target_is_directory=True)
        os.replace(fresh, link)
    except OSError as error:
        raise Unavailable(f"the folder {folder} takes no link: {error.strerror}") from error
