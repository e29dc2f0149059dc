"""The catalogue as it is for work of a lower class: every tenant at most as urgent as `at_most`.

A batch's lines and requests that ask for it (`service_tier: flex`) run in the batch class, whatever their tenant's is;
nobody becomes more urgent this way.
"""

import msgspec

from roundhouse.catalogue.records import Catalogue
from roundhouse.catalogue.store import CatalogueView, Listener
from roundhouse.vocabulary import PriorityClass

_URGENCY = {PriorityClass.INTERACTIVE: 2, PriorityClass.STANDARD: 1, PriorityClass.BATCH: 0}


class ClassView:
    """`CatalogueView` over another one; a generation is copied once."""

    def __init__(self, catalogue: CatalogueView, at_most: PriorityClass) -> None:
        self._catalogue = catalogue
        self._at_most = at_most
        self._seen: Catalogue | None = None
        self._shown: Catalogue | None = None

    @property
    def current(self) -> Catalogue:
        """See `CatalogueView.current`."""
        seen = self._catalogue.current
        if self._shown is None or self._seen is not seen:
            self._seen, self._shown = seen, self._lowered(seen)
        return self._shown

    def subscribe(self, listener: Listener) -> None:
        """See `CatalogueView.subscribe`."""
        self._catalogue.subscribe(lambda catalogue: listener(self._lowered(catalogue)))

    async def refresh(self) -> None:
        """See `CatalogueView.refresh`."""
        await self._catalogue.refresh()

    def _lowered(self, catalogue: Catalogue) -> Catalogue:
        tenants = {
            name: msgspec.structs.replace(tenant, priority_class=self._at_most)
            if _URGENCY[tenant.priority_class] > _URGENCY[self._at_most]
            else tenant
            for name, tenant in catalogue.tenants.items()
        }
        return msgspec.structs.replace(catalogue, tenants=tenants)
