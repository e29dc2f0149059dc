"""What each salt has in a block table, for shares, counts and erasures. Knows no bytes and no tenants' names."""

from collections.abc import Collection

from services.kvstore.domain.records import Block


class SaltBook:
    """Keys and units by salt; a salt without blocks is not in it."""

    def __init__(self) -> None:
        """Nobody has anything."""
        self._keys: dict[bytes, dict[bytes, None]] = {}
        self._units: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def salts(self) -> tuple[bytes, ...]:
        """Who has something."""
        return tuple(self._keys)

    def keys(self, salt: bytes) -> Collection[bytes]:
        """Blocks of a salt, in order of coming."""
        return self._keys.get(salt, {}).keys()

    def units(self, salt: bytes) -> int:
        """Units of their slots."""
        return self._units.get(salt, 0)

    def add(self, block: Block) -> None:
        """A block has come; once."""
        self._keys.setdefault(block.salt, {})[block.key] = None
        self._units[block.salt] = self._units.get(block.salt, 0) + block.slot.units

    def remove(self, block: Block) -> None:
        """It has gone; once."""
        keys = self._keys[block.salt]
        del keys[block.key]
        self._units[block.salt] -= block.slot.units
        if not keys:
            del self._keys[block.salt], self._units[block.salt]
