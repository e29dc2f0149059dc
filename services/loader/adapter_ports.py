"""What keeps adapters in host memory, and shows vLLM where they are. The fakes pass the contract suites."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from roundhouse.vocabulary import Digest
from services.loader.domain.berths import Berths


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


class BerthBoard(Protocol):
    """Where instances look for the adapters that they know by number: one folder a load, by Triton name."""

    async def start(self) -> Mapping[str, Berths]:
        """What an earlier process gave out, by Triton name. Raises Unavailable."""
        ...

    async def open(self, triton_name: str, count: int, rank_max: int) -> Berths:
        """New ones for a load that is about to begin; those of its earlier loads are gone. Raises Unavailable."""
        ...

    async def point(self, berths: Berths, number: int, target: Path) -> None:
        """Have the instance find `target`, whose path names its digest, under a number. At once, and as a whole.

        Idempotent. Raises Unavailable."""
        ...

    async def close(self, triton_name: str) -> None:
        """The instance has gone. Idempotent."""
        ...
