"""In-memory twins of the catalogue's store and reader. The store passes tests/contract/test_catalogue_store.py."""

from roundhouse.catalogue.records import EMPTY, Catalogue
from roundhouse.catalogue.store import Listener, StoredGeneration
from roundhouse.errors import Conflict, Unavailable


class InMemoryCatalogueStore:
    """`GenerationStore` in a variable; `away` makes every call raise Unavailable."""

    def __init__(self) -> None:
        self.away = False
        self._stored: StoredGeneration | None = None
        self._writes = 0

    async def get(self) -> StoredGeneration | None:
        """See `GenerationStore.get`."""
        self._check()
        return self._stored

    async def token(self) -> str | None:
        """See `GenerationStore.token`."""
        self._check()
        return None if self._stored is None else self._stored.token

    async def put(self, catalogue: Catalogue, *, expected_generation: int) -> None:
        """See `GenerationStore.put`."""
        self._check()
        stored = 0 if self._stored is None else self._stored.catalogue.generation
        if stored != expected_generation:
            raise Conflict(f"the catalogue is at generation {stored}, not {expected_generation}: apply again")
        self._writes += 1
        self._stored = StoredGeneration(catalogue, f"{catalogue.generation}-{self._writes}")

    def lose_everything(self) -> None:
        """What a restarted Redis without persistence looks like."""
        self._stored = None

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the catalogue cannot be read now")


class FixedCatalogue:
    """`CatalogueView` that tests set by hand."""

    def __init__(self, catalogue: Catalogue = EMPTY) -> None:
        self.current = catalogue
        self.not_ready_reason: str | None = None
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """See `CatalogueView.subscribe`."""
        self._listeners.append(listener)
        if self.current.generation > 0:
            listener(self.current)

    async def refresh(self) -> None:
        """Nothing to read."""

    def replace(self, catalogue: Catalogue) -> None:
        """Make `catalogue` current and tell the listeners."""
        self.current = catalogue
        for listener in self._listeners:
            listener(catalogue)
