"""What the next loader process must know, in a small file of the cache folder."""

import asyncio
import os
from pathlib import Path

import msgspec

from roundhouse.errors import Unavailable
from services.loader.adapters.cache_manifest import write_synced
from services.loader.ports import Remembered

_decode = msgspec.json.Decoder(Remembered).decode


class NodeFile:
    """`NodeMemory` in CACHE_DIR/node.json, replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "node.json"

    async def recall(self) -> Remembered:
        """See `NodeMemory.recall`."""
        return await asyncio.to_thread(self._recall)

    async def keep(self, remembered: Remembered) -> None:
        """See `NodeMemory.keep`."""
        await asyncio.to_thread(self._keep, remembered)

    def _recall(self) -> Remembered:
        try:
            return _decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return Remembered()

    def _keep(self, remembered: Remembered) -> None:
        fresh = self._path.with_suffix(".new")
        try:
            write_synced(fresh, msgspec.json.encode(remembered))
            os.replace(fresh, self._path)
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be written: {error.strerror}") from error
