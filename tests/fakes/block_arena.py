"""An arena in this process's own memory. Passes `tests/contract/test_block_arena.py` as the real one does."""


class FakeArena:
    """`BlockArena` over a bytearray; nobody else can map it."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = bytearray(nbytes)

    @property
    def path(self) -> str:
        """There is no file."""
        return ""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self._bytes)

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes themselves. Raises ValueError outside of the arena."""
        if offset < 0 or length < 0 or offset + length > len(self._bytes):
            raise ValueError(f"{offset}+{length} is not within an arena of {len(self._bytes)} bytes")
        return memoryview(self._bytes)[offset : offset + length]
