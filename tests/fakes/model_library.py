"""The catalogue as a loader's operations see it, set by hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.placement import Placement, placement_parameter
from roundhouse.catalogue.records import Adapter, ContentFile, Model
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import AdapterName, Digest, ModelName, TenantId
from services.loader.device_ports import Setting
from services.loader.domain.berths import Berths
from services.loader.domain.versions import ModelVersion, triton_model_name
from services.loader.ports import ArenaView, LoadPackage


@dataclass(slots=True)
class FakeLibrary:
    """`ModelLibrary` set by hand; `knobs` go to the fake Triton with each package."""

    models: dict[ModelVersion, Model] = field(default_factory=dict)
    knobs: dict[ModelName, dict[str, str]] = field(default_factory=dict)
    is_known: bool = True
    maps: bool = True
    declared: dict[AdapterName, Adapter] = field(default_factory=dict)
    misfits: dict[Digest, str] = field(default_factory=dict)
    """Why an adapter fits no base."""
    looked_at: list[tuple[Digest, Digest]] = field(default_factory=list)
    """Every look at an adapter and a base."""
    views: list[ArenaView | None] = field(default_factory=list)
    """Where the engine of each package finds its weights in host memory."""
    berths: list[Berths | None] = field(default_factory=list)
    """Where it finds adapters."""

    def find(self, version: ModelVersion) -> Model:
        """See `ModelLibrary.find`."""
        if version not in self.models:
            raise NotFound(f"the catalogue has no {version}")
        return self.models[version]

    def versions(self) -> Mapping[str, ModelVersion]:
        """See `ModelLibrary.versions`."""
        return {triton_model_name(version): version for version in self.models}

    def adapter(self, name: AdapterName, tenant_id: TenantId) -> Adapter:
        """See `ModelLibrary.adapter`."""
        found = self.declared.get(name)
        if found is None or found.tenant not in (None, tenant_id):
            raise NotFound(f"there is no adapter {name}")
        return found

    def adapters(self) -> Mapping[AdapterName, Adapter]:
        """See `ModelLibrary.adapters`."""
        return self.declared

    async def check_adapter(self, weights: Path, base: Model, base_weights: Path) -> None:
        """See `ModelLibrary.check_adapter`."""
        digest = Digest(weights.name)
        self.looked_at.append((digest, base.digest))
        if digest in self.misfits:
            raise InvalidInput(self.misfits[digest], code="adapter_invalid")

    async def device_bytes(self, model: Model) -> int:
        """See `ModelLibrary.device_bytes`."""
        return model.device_bytes

    def mapped_files(self, model: Model, files: Sequence[ContentFile]) -> tuple[ContentFile, ...]:
        """See `ModelLibrary.mapped_files`."""
        return tuple(files) if self.maps else ()

    async def package(self, model: Model, weights: Path, arena: ArenaView | None, setting: Setting) -> LoadPackage:
        """See `ModelLibrary.package`."""
        placement = placement_parameter(Placement(tuple(each.uuid for each in setting.devices), setting.alone_for))
        knobs = {**self.knobs.get(model.name, {}), "devices": placement}
        self.views.append(arena)
        self.berths.append(setting.berths)
        return LoadPackage(json.dumps({"parameters": {name: {"string_value": text} for name, text in knobs.items()}}))
