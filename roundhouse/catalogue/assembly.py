"""A checked declaration → a catalogue, by reading the files it names: digests, sizes, context lengths.

Blocking; run it in a thread. Files are read by a few threads at once: hashing leaves the interpreter lock, so this is
as fast as the disk. The generation is set by whoever stores the result.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from roundhouse.catalogue import sizes
from roundhouse.catalogue.declaration import Declaration
from roundhouse.catalogue.digests import DigestCache, FileEntry, Progress, digest_of_entries, version_entries
from roundhouse.catalogue.lora import check_adapter, rank_max_over
from roundhouse.catalogue.problems import DeclarationRefused, Problem
from roundhouse.catalogue.records import (
    Adapter,
    Budget,
    Catalogue,
    ContentFile,
    Engine,
    Interface,
    Limits,
    Model,
    ModelLimits,
    Price,
    ScopeLimits,
    SharingGroup,
    Tenant,
    is_address,
)
from roundhouse.catalogue.shape import (
    AdapterShape,
    BudgetShape,
    DatedPriceShape,
    ModelShape,
    PriceShape,
    ScopeLimitsShape,
    SourceShape,
    TenantShape,
    interface_of,
)
from roundhouse.catalogue.sizes import SizedVersion, SizeEstimator
from roundhouse.catalogue.yaml_document import Path as Where
from roundhouse.errors import InvalidInput, RoundhouseError
from roundhouse.vocabulary import AdapterName, Digest, ModelName, PoolName, PriorityClass, TenantId

READERS = 4  # enough to keep one NVMe drive busy, few enough to leave a small machine its cores

Shape = TypeVar("Shape")
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class FileReading:
    """How files are read: what is known of them already, how sizes are estimated, and who is told of progress."""

    cache: DigestCache
    estimate: SizeEstimator = sizes.device_bytes
    progress: Progress | None = None


def assemble(declaration: Declaration, reading: FileReading) -> Catalogue:
    """The catalogue of a declaration, with generation 0. Raises DeclarationRefused, with every unreadable file."""
    work = _Assembly(declaration, reading)
    with ThreadPoolExecutor(READERS, thread_name_prefix="digest") as pool:
        models = list(pool.map(work.attempt(work.model), declaration.models.items()))
        adapters = list(pool.map(work.attempt(work.adapter), declaration.adapters.items()))
    tenants = [_tenant(shape) for shape in declaration.tenants.values()]
    good_models, bad_models = _split(models)
    good_adapters, bad_adapters = _split(adapters)
    bad_adapters += _misfits(work, {model.name: model for model in good_models}, good_adapters)
    if bad_models or bad_adapters:
        raise DeclarationRefused([*bad_models, *bad_adapters])
    return Catalogue(
        tenants={tenant.name: tenant for tenant in tenants},
        models={model.name: model for model in good_models},
        adapters={adapter.name: adapter for adapter in good_adapters},
        sharing_groups={
            group.name: SharingGroup(
                name=group.name, tenants=tuple(map(TenantId, group.tenants)), prompts=tuple(group.prompts)
            )
            for group in declaration.sharing_groups.values()
        },
    )


def _split(results: Sequence[Record | Problem]) -> tuple[list[Record], list[Problem]]:
    problems = [result for result in results if isinstance(result, Problem)]
    return [result for result in results if not isinstance(result, Problem)], problems


def _misfits(work: "_Assembly", models: dict[ModelName, Model], adapters: Sequence[Adapter]) -> list[Problem]:
    """Adapters that their bases cannot use, as far as files can be read here; the loader looks again in any case."""
    places = {shape.name: where for where, shape in work.declaration.adapters.items()}
    problems: list[Problem] = []
    for adapter in adapters:
        base, where = models.get(adapter.base), places[adapter.name]
        if base is None:
            continue  # a problem of its own
        if adapter.base_digest not in (None, base.digest):
            reason = f"made for another version of `{base.name}`: that has the digest {base.digest}"
            problems.append(work.declaration.refuse_at((*where, "base_digest"), reason))
        if is_address(adapter.source_path):
            continue
        try:
            check_adapter(Path(adapter.source_path), base.engine, work.config_of(base), rank_max_over(base))
        except RoundhouseError as error:
            problems.append(work.declaration.refuse_at((*where, "source", "path"), error.message))
    return problems


class _Assembly:
    def __init__(self, declaration: Declaration, reading: FileReading) -> None:
        self.declaration = declaration
        self._reading = reading
        self._configs: dict[str, dict[str, Any] | None] = {}

    def config_of(self, base: Model) -> dict[str, Any] | None:
        """The config.json of a base that has one here. Raises InvalidInput, NotFound."""
        folder = base.source_path
        if folder not in self._configs:
            readable = not is_address(folder) and (Path(folder) / "config.json").is_file()
            self._configs[folder] = sizes.model_config(Path(folder)) if readable else None
        return self._configs[folder]

    def attempt(self, make: Callable[[Shape], Record]) -> Callable[[tuple[Where, Shape]], Record | Problem]:
        """`make`, with what goes wrong as a problem at the item's path."""

        def run(item: tuple[Where, Shape]) -> Record | Problem:
            where, shape = item
            try:
                return make(shape)
            except RoundhouseError as error:
                return self.declaration.refuse_at((*where, "source", "path"), error.message)

        return run

    def model(self, shape: ModelShape) -> Model:
        if shape.source.is_address:
            return self._model(shape, shape.source.path, _listed(shape.source), _given_sizes(shape))
        path, engine = self.declaration.path_of(shape.source.path), Engine(shape.engine)
        context = self._context_tokens(shape, path)
        kv_tokens = shape.memory.kv_pool_tokens
        kv_pool_tokens = kv_tokens if kv_tokens is not None else context * shape.slots
        device = shape.memory.device
        if device == "auto":
            sized = SizedVersion(path, engine, kv_pool_tokens, shape.adapter_slots, shape.adapter_rank_max)
            device = self._reading.estimate(sized)
        tokenizer = str(path) if interface_of(shape) == "llm" and (path / "tokenizer.json").is_file() else ""
        return self._model(shape, str(path), self._content(path), _Sizes(context, kv_pool_tokens, device, tokenizer))

    def _model(self, shape: ModelShape, source: str, content: Sequence[FileEntry], sized: "_Sizes") -> Model:
        return Model(
            name=ModelName(shape.name),
            source_path=source,
            engine=Engine(shape.engine),
            interface=Interface(interface_of(shape)),
            digest=digest_of_entries(content),
            files=_files(content),
            slots=shape.slots,
            device_bytes=sized.device_bytes,
            kv_pool_tokens=sized.kv_pool_tokens,
            context_tokens=sized.context_tokens,
            tokenizer_path=self._tokenizer(shape) or sized.tokenizer_path,
            derived=_left_to_the_files(shape),
            pool=PoolName(shape.pool),
            ttft_slo_ms=shape.slo.time_to_first_token_ms,
            cold_start_slo_ms=shape.slo.cold_start_ms,
            pinned=shape.residency.pinned,
            min_replicas=shape.residency.min_replicas,
            tensor_parallel=shape.tensor_parallel,
            adapter_slots=shape.adapter_slots,
            adapter_rank_max=shape.adapter_rank_max,
            fallback=None if shape.fallback is None else ModelName(shape.fallback),
            access=tuple(shape.access.tenants),
            tenant_limits=None if shape.tenant_limits is None else _scope_limits(shape.tenant_limits),
            price=_price(shape.price, shape.name),
            prices=tuple(_dated_price(price, shape.name) for price in shape.prices),
        )

    def adapter(self, shape: AdapterShape) -> Adapter:
        source = shape.source
        path = source.path if source.is_address else str(self.declaration.path_of(source.path))
        content = _listed(source) if source.is_address else self._content(Path(path))
        return Adapter(
            name=AdapterName(shape.name),
            base=ModelName(shape.base),
            base_digest=None if shape.base_digest is None else Digest(shape.base_digest),
            source_path=path,
            digest=digest_of_entries(content),
            files=_files(content),
            tenant=None if shape.tenant is None else TenantId(shape.tenant),
            price=_price(shape.price, shape.name),
            prices=tuple(_dated_price(price, shape.name) for price in shape.prices),
        )

    def _content(self, path: Path) -> list[FileEntry]:
        return version_entries(path, cache=self._reading.cache, progress=self._reading.progress)

    def _context_tokens(self, shape: ModelShape, path: Path) -> int:
        if interface_of(shape) != "llm":
            return 0
        if Engine(shape.engine) is Engine.TRITON:
            assert shape.context_tokens is not None, "the declaration was checked"
            return shape.context_tokens
        positions = sizes.context_tokens(path)
        if shape.context_tokens is not None and shape.context_tokens > positions:
            raise InvalidInput(f"context_tokens {shape.context_tokens} is more than the model's {positions} positions")
        return shape.context_tokens or positions

    def _tokenizer(self, shape: ModelShape) -> str:
        """The folder that the declaration names; empty = none."""
        if shape.tokenizer is None:
            return ""
        given = self.declaration.path_of(shape.tokenizer)
        return str(given.parent if given.is_file() else given)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is read from a version's files, or declared where they are not here."""

    context_tokens: int
    kv_pool_tokens: int
    device_bytes: int
    tokenizer_path: str = ""


def _given_sizes(shape: ModelShape) -> _Sizes:
    context = shape.context_tokens or 0
    kv_tokens = shape.memory.kv_pool_tokens
    return _Sizes(context, kv_tokens if kv_tokens is not None else context * shape.slots, shape.memory.device)


def _left_to_the_files(shape: ModelShape) -> tuple[str, ...]:
    left = {
        "device_bytes": shape.memory.device == "auto",
        "kv_pool_tokens": shape.memory.kv_pool_tokens is None,
        "context_tokens": shape.context_tokens is None,
        "tokenizer_path": shape.tokenizer is None,
    }
    return tuple(name for name, is_left in left.items() if is_left)


def _listed(source: SourceShape) -> list[FileEntry]:
    return [FileEntry(file.name, file.size, bytes.fromhex(file.sha256)) for file in source.files]


def _files(content: Sequence[FileEntry]) -> tuple[ContentFile, ...]:
    return tuple(ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in content)


def _tenant(shape: TenantShape) -> Tenant:
    return Tenant(
        name=TenantId(shape.name),
        weight=shape.weight,
        priority_class=PriorityClass(shape.priority_class),
        limits=Limits(**shape.limits.model_dump()),
        budget=_budget(shape.budget),
        isolation=shape.isolation,
        fallback=shape.fallback,
        models=tuple(shape.models),
        usage_retention_days=shape.usage_retention_days,
        limits_per_model=tuple(
            ModelLimits(pattern=each.model, limits=_scope_limits(each)) for each in shape.limits_per_model
        ),
        sharing_group=shape.sharing_group or "",
    )


def _budget(shape: BudgetShape | None) -> Budget | None:
    return None if shape is None else Budget(**shape.model_dump())


def _scope_limits(shape: ScopeLimitsShape) -> ScopeLimits:
    rates = shape.model_dump(exclude={"model", "budget"})
    return ScopeLimits(**rates, budget=_budget(shape.budget))


def _price(shape: PriceShape | None, name: str) -> Price | None:
    return None if shape is None else _price_of(shape, name)


def _price_of(shape: PriceShape, name: str) -> Price:
    return Price(
        id=shape.id or name,
        currency=shape.currency,
        input=shape.input,
        cached_input=shape.cached_input,
        output=shape.output,
    )


def _dated_price(shape: DatedPriceShape, name: str) -> Price:
    return msgspec.structs.replace(
        _price_of(shape, name),
        priority_class=shape.priority_class or "",
        effective_from_ms=shape.effective_from,
    )
