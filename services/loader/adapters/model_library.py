"""The catalogue and the engines, as the loader's operations need them.

A version is known only while the catalogue has its digest: the newest generation decides what may be loaded.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engines.packaging import (
    AdapterBerths,
    ArenaRanges,
    EngineDevice,
    EngineSpec,
    PackagingError,
    estimate_device_bytes,
    maps_file,
    package,
)
from roundhouse.catalogue.lora import check_adapter, rank_max_over
from roundhouse.catalogue.records import Adapter, Catalogue, ContentFile, Model
from roundhouse.catalogue.sizes import model_config
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import AdapterName, TenantId
from services.loader.adapters.own_thread import in_own_thread
from services.loader.device_ports import Setting
from services.loader.domain.versions import ModelVersion, triton_model_name
from services.loader.ports import ArenaView, LoadPackage


class CatalogueLibrary:
    """`ModelLibrary` over the catalogue that this process follows."""

    def __init__(self, catalogue: CatalogueView, kvstore_address: str) -> None:
        self._catalogue = catalogue
        self._kvstore_address = kvstore_address
        self._versions: dict[str, ModelVersion] = {}
        catalogue.subscribe(self._on_generation)

    @property
    def is_known(self) -> bool:
        """See `ModelLibrary.is_known`."""
        return self._catalogue.current.generation > 0

    def find(self, version: ModelVersion) -> Model:
        """See `ModelLibrary.find`."""
        model = self._catalogue.current.models.get(version.model)
        if model is None or model.digest != version.digest:
            raise NotFound(f"the catalogue has no {version}")
        return model

    def versions(self) -> Mapping[str, ModelVersion]:
        """See `ModelLibrary.versions`."""
        return self._versions

    def adapter(self, name: AdapterName, tenant_id: TenantId) -> Adapter:
        """See `ModelLibrary.adapter`."""
        found = self._catalogue.current.resolve(tenant_id, name)
        if found is None or found[1] is None:
            raise NotFound(f"there is no adapter {name}, or this tenant may not use it")
        return found[1]

    def adapters(self) -> Mapping[AdapterName, Adapter]:
        """See `ModelLibrary.adapters`."""
        return self._catalogue.current.adapters

    async def check_adapter(self, weights: Path, base: Model, base_weights: Path) -> None:
        """See `ModelLibrary.check_adapter`."""
        await asyncio.to_thread(_check_adapter, weights, base, base_weights)

    async def device_bytes(self, model: Model) -> int:
        """See `ModelLibrary.device_bytes`."""
        if model.device_bytes > 0:
            return model.device_bytes
        try:
            return await in_own_thread(estimate_device_bytes, self._spec(model, Path(model.source_path)))
        except PackagingError as error:
            raise InvalidInput(str(error)) from error

    def mapped_files(self, model: Model, files: Sequence[ContentFile]) -> tuple[ContentFile, ...]:
        """See `ModelLibrary.mapped_files`."""
        return tuple(file for file in files if maps_file(model.engine.value, file.name))

    async def package(self, model: Model, weights: Path, arena: ArenaView | None, setting: Setting) -> LoadPackage:
        """See `ModelLibrary.package`."""
        ranges = None if arena is None else ArenaRanges(str(arena.path), arena.ranges)
        placed = tuple(
            EngineDevice(each.uuid, each.ordinal, each.visible_as, each.capacity) for each in setting.devices
        )
        size = await self.device_bytes(model) if placed else 0
        berths = setting.berths
        spec = replace(
            self._spec(model, weights, ranges),
            devices=placed,
            share=-(-size // len(placed)) if placed else 0,
            alone_for=setting.alone_for,
            berths=None if berths is None else AdapterBerths(berths.name, berths.folder, berths.count),
        )
        try:
            made = await asyncio.to_thread(package, spec)
        except PackagingError as error:
            raise InvalidInput(str(error)) from error
        return LoadPackage(json.dumps(made.config), made.files)

    def _spec(self, model: Model, weights: Path, arena: ArenaRanges | None = None) -> EngineSpec:
        return EngineSpec(
            engine=model.engine.value,
            triton_model_name=triton_model_name(ModelVersion(model.name, model.digest)),
            weights_path=str(weights),
            model_digest=model.digest,
            slots=model.slots,
            kv_pool_tokens=model.kv_pool_tokens,
            kvstore_address=self._kvstore_address,
            tensor_parallel=model.tensor_parallel,
            adapter_slots=model.adapter_slots,
            adapter_rank_max=model.adapter_rank_max,
            arena=arena,
        )

    def _on_generation(self, catalogue: Catalogue) -> None:
        versions = (ModelVersion(model.name, model.digest) for model in catalogue.models.values())
        self._versions = {triton_model_name(version): version for version in versions}


def _check_adapter(weights: Path, base: Model, base_weights: Path) -> None:
    config = model_config(base_weights) if (base_weights / "config.json").is_file() else None
    check_adapter(weights, base.engine, config, rank_max_over(base))
