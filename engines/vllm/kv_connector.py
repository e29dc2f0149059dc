"""vLLM's KV connector interface over the node's kvstore: prefixes come from it, new blocks go to it in the background.

Named in vLLM's configuration, for one worker (no tensor or pipeline parallelism) and one group of attention layers:

    KVTransferConfig(kv_connector="RoundhouseConnector", kv_role="kv_both",
                     kv_connector_module_path="engines.vllm.kv_connector", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"kvstore_address": "host:port", "model_digest": "sha256:…"})

A request names its tenant's salt as `cache_salt`, or, behind Triton's vLLM backend, which passes none, in its sampling
parameters, as gateways do: `extra_args["roundhouse"]["salt"]`. Without one nothing is kept (invariant 11). A LoRA
request names its adapter's digest in the same place or in `kv_transfer_params`, as `adapter_digest`, else nothing is
kept. A block that was wrong when it was copied is told to vLLM, which computes it. Imported by vLLM only, in an
environment of its own; the bookkeeping is in `block_saves`, the store's protocol in `store_link`. Written against vLLM
0.32 (`KVConnectorBase_V1`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from engines.vllm.block_saves import SavePlan, TrackedRequest, keys_of, layout_digest, save_plan
from engines.vllm.store_link import NOTHING_FOUND, Bytes, FoundRun, StoreLink


@dataclass(frozen=True)
class LoadPlan:
    """Blocks of a run, from number `first` on, and where vLLM wants them."""

    request_id: str
    run: FoundRun
    first: int
    block_ids: tuple[int, ...]


@dataclass
class StepPlans(KVConnectorMetadata):  # type: ignore[misc,unused-ignore]  # untyped outside of vLLM's environment
    """What the worker does around one step."""

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    releases: list[FoundRun] = field(default_factory=list)


class RoundhouseConnector(KVConnectorBase_V1):  # type: ignore[misc,unused-ignore]
    """Both roles; the scheduler's looks up and plans, the worker's copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Connects at once, without waiting for the store. Raises ValueError for what it cannot serve."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.parallel_config.world_size != 1 or len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("the kvstore is used by one worker with one group of attention layers")
        settings = self._kv_transfer_config.get_from_extra_config
        self._link = StoreLink(settings("kvstore_address", ""))
        self._block_tokens = vllm_config.cache_config.block_size
        self._digest = _digest(settings("model_digest", ""), vllm_config, kv_cache_config)
        self._tracked: dict[str, TrackedRequest] = {}
        self._found: dict[str, FoundRun] = {}
        self._to_load: dict[str, LoadPlan] = {}
        self._to_release: list[FoundRun] = []
        self._layers: list[torch.Tensor] = []
        self._wrong: set[int] = set()
        self._spoilt: set[str] = set()  # requests of this step that had a wrong block

    # Scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens in the kvstore beyond those that vLLM has; leases them. One token is left to compute."""
        tracked = self._tracked.get(request.request_id) or _tracked(request)
        if tracked is None:
            return 0, False
        self._tracked[request.request_id] = tracked
        self._give_up(request.request_id)
        keys = keys_of(tracked, self._digest, self._block_tokens, len(tracked.token_ids) - 1)
        run = self._link.lookup(tracked.salt, keys)
        more = len(run.offsets) * self._block_tokens - num_computed_tokens
        self._found[request.request_id] = run
        if more <= 0:
            self._give_up(request.request_id)
            return 0, False
        return more, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the copies into the blocks that vLLM has chosen."""
        run = self._found.pop(request.request_id, NOTHING_FOUND)
        if num_external_tokens <= 0 or not run.lease_id:
            self._to_release.append(run)
            return
        stop = len(run.offsets)
        first = stop - num_external_tokens // self._block_tokens
        block_ids = blocks.get_block_ids()[0][first:stop]
        self._to_load[request.request_id] = LoadPlan(request.request_id, run, first, tuple(block_ids))
        self._tracked[request.request_id].stored = stop

    def build_connector_meta(self, scheduler_output: Any) -> StepPlans:
        """Loads, and saves of the blocks that this step completes."""
        plans = StepPlans(loads=list(self._to_load.values()), releases=self._to_release)
        self._to_load, self._to_release = {}, []
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._tracked:
                self._tracked[new.req_id].block_ids = list(new.block_ids[0])
                self._plan_save(plans, new.req_id, new.num_computed_tokens, scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for number, req_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(req_id)
            if tracked is None:
                continue
            new_ids = cached.new_block_ids[number]
            if req_id in cached.resumed_req_ids:
                tracked.block_ids = []
            if new_ids is not None:
                tracked.block_ids += new_ids[0]
            self._plan_save(plans, req_id, cached.num_computed_tokens[number], scheduler_output)
        return plans

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks were copied in the step that completed them."""
        self._give_up(request.request_id)
        self._tracked.pop(request.request_id, None)
        return False, None

    def _plan_save(self, plans: StepPlans, req_id: str, computed: int, scheduler_output: Any) -> None:
        after = computed + scheduler_output.num_scheduled_tokens[req_id]
        plan = save_plan(req_id, self._tracked[req_id], self._digest, self._block_tokens, after)
        if plan is not None:
            plans.saves.append(plan)

    def _give_up(self, request_id: str) -> None:
        self._to_release.append(self._found.pop(request_id, NOTHING_FOUND))

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The paged memory of each layer, `[blocks, …]`."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy what was found into vLLM's blocks before the step reads them; after a wrong one the rest is not used."""
        plans = self._get_connector_metadata()
        self._spoilt = set()
        for load in plans.loads:
            for place, block_id in enumerate(load.block_ids):
                if not self._link.read(load.run, load.first + place, partial(self._fill, block_id)):
                    self._wrong.update(load.block_ids[place:])
                    self._spoilt.add(load.request_id)
                    break
            self._link.release(load.run)
        for run in plans.releases:
            self._link.release(run)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are taken whole, after the step."""

    def wait_for_save(self) -> None:
        """Copy what became whole out of vLLM's memory; storing it is not waited for."""
        for plan in self._get_connector_metadata().saves:
            if plan.request_id not in self._spoilt:  # else it was computed from what a wrong block said
                self._link.save(plan, [self._taken(block_id) for block_id in plan.block_ids], self._digest)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must compute itself."""
        wrong, self._wrong = self._wrong, set()
        return wrong

    def shutdown(self) -> None:
        """End the connection. Idempotent."""
        self._link.close()

    def _taken(self, block_id: int) -> Bytes:
        parts = [layer[block_id].detach().cpu().contiguous().view(torch.uint8).reshape(-1) for layer in self._layers]
        taken: Bytes = torch.cat(parts).numpy()
        return taken

    def _fill(self, block_id: int, data: Bytes) -> None:
        at, whole = 0, torch.from_numpy(data)
        for layer in self._layers:
            block = layer[block_id]
            nbytes = block.numel() * block.element_size()
            block.copy_(whole[at : at + nbytes].view(layer.dtype).reshape(block.shape))
            at += nbytes


def _tracked(request: Any) -> TrackedRequest | None:
    """A request whose blocks may be kept: it has a salt and, if it uses an adapter, names its digest."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    named = {**(request.kv_transfer_params or {}), **(extra.get("roundhouse") or {})}
    salt = getattr(request, "cache_salt", None) or named.get("salt")
    adapter = named.get("adapter_digest", "")
    if not salt or not request.prompt_token_ids or (request.lora_request is not None and not adapter):
        return None
    return TrackedRequest(_named(salt), _named(adapter), request.all_token_ids)


def _digest(model_digest: str, vllm_config: Any, kv_cache_config: Any) -> bytes:
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    shape = (spec.block_size, spec.num_kv_heads, spec.head_size, spec.page_size_bytes)
    return layout_digest(_named(model_digest), str(spec.dtype), [shape] * len(group.layer_names))


def _named(text: str) -> bytes:
    try:
        return bytes.fromhex(text.removeprefix("sha256:"))
    except ValueError:
        return text.encode()
