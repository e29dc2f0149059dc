"""What the kvstore's operations need of the world. Adapters implement these; tests pass fakes.

`tests/contract/test_block_arena.py` holds the fake and the real arena to one contract.
"""

from typing import Protocol


class BlockArena(Protocol):
    """A fixed piece of memory that the engines of the node share with this process."""

    @property
    def path(self) -> str:
        """What an engine maps; empty if nothing can be mapped."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in bytes; never changes."""
        ...

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes from `offset`, readable and writable, without a copy. Raises ValueError outside of the arena.

        Release it before the arena is closed."""
        ...
