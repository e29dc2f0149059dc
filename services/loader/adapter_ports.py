"""What keeps adapters in host memory. The fake passes the contract suite of the real adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from roundhouse.vocabulary import Digest


class AdapterShelf(Protocol):
    """Copies of adapters in host memory, one folder each, by digest."""

    async def start(self) -> Mapping[Digest, int]:
        """What an earlier process left whole, with its bytes; what it left half-done is gone."""
        ...

    def path(self, digest: Digest) -> Path:
        """Where an adapter lies, or would."""
        ...

    async def put(self, digest: Digest, source: Path) -> None:
        """Copy a folder; it has its final name once it is whole. Idempotent. Raises Unavailable (no memory)."""
        ...

    async def remove(self, digest: Digest) -> None:
        """Idempotent."""
        ...
