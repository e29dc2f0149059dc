"""Requests that wait while their model gets another version. On virtual time, over fakes (case B19)."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from roundhouse.catalogue.records import Catalogue
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Digest, Outcome, RequestId
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.run import Waiting
from tests.fakes.catalogue import FixedCatalogue
from tests.unit.gateway.gateway_world import GatewayWorld
from tests.unit.gateway.scenarios import billed, collect, in_world


def following(world: GatewayWorld, *, tokenizer: str = "") -> FixedCatalogue:
    """The catalogue names version 2 of the model, with another tokenizer if one is given."""
    model = world.work().model
    new = msgspec.structs.replace(model, digest=Digest("sha256:new"), tokenizer_path=tokenizer or model.tokenizer_path)
    catalogue = FixedCatalogue(Catalogue(generation=2, models={model.name: new}))
    world.parts = replace(world.parts, catalogue=catalogue)
    return catalogue


def test_a_request_follows_its_model_to_the_version_that_took_over() -> None:
    """Case B19: queued for version 1, given back, granted on version 2. One answer, one bill for what ran; what was
    given back ended as cancelled and cost nothing."""

    async def scenario(world: GatewayWorld) -> None:
        following(world)
        world.scheduler.grants_at_once = False
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(1)
        gone = wire.Refused(reason=wire.Refused.REASON_MODEL_UNKNOWN, message="another version took over")
        assert world.scheduler.reject(world.scheduler.submitted[0], gone)
        await asyncio.sleep(1)
        assert world.scheduler.grant(world.scheduler.submitted[1])
        assert [event for event in await task if not isinstance(event, Waiting)]

    world = in_world(scenario)
    assert [submit.model_digest for submit in world.scheduler.submitted][1:] == ["sha256:new"]
    assert world.scheduler.submitted[1].block_keys == []
    first, second = world.usage.recorded
    assert billed(first) == (Outcome.CANCELLED, 0, 0)
    assert billed(second) == (Outcome.DONE, 10, 3)
    assert (first.id, second.id, second.data.model_digest) == ("r1/1", "r1/2", "sha256:new")


def test_a_prompt_that_the_new_version_reads_otherwise_is_not_sent_to_it() -> None:
    """The prompt is token ids by then; with another tokenizer they mean something else. The caller may try again."""

    async def scenario(world: GatewayWorld) -> None:
        following(world, tokenizer="/other")
        world.scheduler.refused = wire.Refused(reason=wire.Refused.REASON_MODEL_UNKNOWN)
        with pytest.raises(Unavailable) as refused:
            await collect(world)
        assert refused.value.retry_after_ms

    assert len(in_world(scenario).scheduler.submitted) == 1


def test_a_scheduler_that_is_behind_is_asked_again_for_ten_seconds() -> None:
    """A version that is in the catalogue here and not there yet is no error; one that never comes is."""

    async def scenario(world: GatewayWorld) -> None:
        following(world)
        world.scheduler.refused = wire.Refused(reason=wire.Refused.REASON_MODEL_UNKNOWN)
        task = asyncio.create_task(collect(world))
        await asyncio.sleep(3)
        world.scheduler.refused = None
        assert await task
        world.scheduler.refused = wire.Refused(reason=wire.Refused.REASON_MODEL_UNKNOWN)
        began_ms = world.clock.monotonic_ms()
        work = replace(world.work(), request_id=RequestId("r2"))
        with pytest.raises(Unavailable):
            await collect(world, work)
        assert world.clock.monotonic_ms() - began_ms == 10_000

    in_world(scenario)
