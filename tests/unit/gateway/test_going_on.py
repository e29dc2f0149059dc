"""A stream whose node is lost goes on elsewhere, and a request over two nodes is one request. Over fakes."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from roundhouse.errors import EngineFailed
from roundhouse.vocabulary import Outcome, RequestId
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.call_progress import token_ids_of
from services.gateway.operations.engine_streams import Produced
from services.gateway.operations.run import RunEvent
from services.gateway.operations.run_request import run_request
from services.gateway.ports import EngineChunk, EngineRequest, NodeLost
from tests.unit.gateway.gateway_world import GatewayWorld
from tests.unit.gateway.scenarios import billed, collect, in_world

PREFILL = wire.Placement(
    node_id="p1", triton_grpc_address="127.0.0.1:1", triton_model_name="m--0", kvstore_address="127.0.0.1:7"
)
DECODE = wire.Placement(
    node_id="d1", triton_grpc_address="127.0.0.1:2", triton_model_name="m--0", kvstore_address="127.0.0.1:8"
)


async def collected(world: GatewayWorld, **wishes: Any) -> list[RunEvent]:
    """Run a request whose engine is asked to name its tokens."""
    return await collect(world, world.work(resumable=True, **wishes))


def text_of(events: list[RunEvent]) -> str:
    """What the client reads of the first choice."""
    pieces = [each.piece for each in events if isinstance(each, Produced) and each.index == 0]
    return "".join(piece.text for piece in pieces if isinstance(piece, EngineChunk))


def test_a_stream_whose_node_dies_goes_on_from_its_tokens() -> None:
    """Invariant 13, case B29: the node dies after 2 of 5 tokens. The client reads all five once; the first attempt
    bills the prompt and 2, the second no prompt and 3."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failures_left = 2, 1
        events = await collected(world, output_tokens=5)
        assert world.scheduler.nodes_lost == [], "an engine's own failure says nothing about its node"
        assert text_of(events) == "tok0 tok1 tok2 tok3 tok4 "
        pieces = [each for each in events if isinstance(each, Produced)]
        assert [each.seen_before for each in pieces] == [False, True, True, True, True]

    world = in_world(scenario)
    second = world.node.calls[1]
    assert isinstance(second, EngineRequest)
    assert (second.phase, second.resumed_token_ids) == ("decode", (0, 1))
    assert [billed(event) for event in world.usage.recorded] == [(Outcome.FAILED, 10, 2), (Outcome.DONE, 0, 3)]
    assert [event.id for event in world.usage.recorded] == ["r1/1", "r1/2"]
    assert [submit.max_output_tokens for submit in world.scheduler.submitted] == [5, 3]
    assert [finish.output_tokens for finish in world.scheduler.finishes] == [2, 3]


def test_a_lost_node_is_told_before_the_next_attempt() -> None:
    """The connection breaks off: every scheduler hears which node it was, once, so the next attempt goes elsewhere."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_after, world.node.failures_left = 2, 1
        world.node.failure = NodeLost("The node that ran the request failed.")
        await collected(world, output_tokens=5)
        assert world.scheduler.nodes_lost == ["node-1"]

    in_world(scenario)


def test_a_stream_leaves_a_node_that_is_emptied() -> None:
    """Maintenance of the node in mid-stream: after the piece that is on its way the stream goes on elsewhere, and no
    scheduler is told that the node is lost. One that cannot go on stays to its end."""

    async def scenario(world: GatewayWorld) -> None:
        for names_tokens, calls in ((True, 2), (False, 3)):
            world.node.names_tokens = names_tokens
            work = replace(world.work(resumable=True, output_tokens=5), request_id=RequestId(f"r{calls}"))
            texts = []
            async with run_request(world.parts, work) as run:
                async for event in run.events():
                    assert isinstance(event, Produced)
                    assert isinstance(event.piece, EngineChunk)
                    texts.append(event.piece.text)
                    if len(texts) == 2:
                        world.attempts.leave("node-1")
            assert texts == [f"tok{number} " for number in range(5)]
            assert len(world.node.calls) == calls
        assert world.scheduler.nodes_lost == []

    in_world(scenario)


def test_of_two_choices_only_the_unfinished_one_goes_on() -> None:
    """Both choices of 3 tokens run in turns on one node, which dies when the first asks for its third: what had ended
    does not run again, and each choice has its three tokens."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.interval_ms = 10
        world.node.fail_after, world.node.failures_left = 2, 1
        events = [each for each in await collected(world, choices=2) if isinstance(each, Produced)]
        for index in (0, 1):
            texts = [each.piece.text for each in events if each.index == index and isinstance(each.piece, EngineChunk)]
            assert texts == ["tok0 ", "tok1 ", "tok2 "]

    world = in_world(scenario)
    assert sum(event.data.output_tokens for event in world.usage.recorded) == 6
    assert sum(event.data.input_tokens for event in world.usage.recorded) == 10


def test_an_engine_that_does_not_name_its_tokens_cannot_be_left() -> None:
    """What has been streamed cannot be continued: the stream fails clearly, and what came is billed once."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.names_tokens = False
        world.node.fail_after, world.node.failures_left = 2, 1
        with pytest.raises(EngineFailed):
            await collected(world, output_tokens=5)

    world = in_world(scenario)
    assert [billed(event) for event in world.usage.recorded] == [(Outcome.FAILED, 10, 2)]


def test_going_on_has_the_same_attempt_budget() -> None:
    """Three attempts a request, wherever they fail: after 1, 2 and 3 tokens the fourth is not made."""

    async def scenario(world: GatewayWorld) -> None:
        world.node.fail_each = 1
        with pytest.raises(EngineFailed):
            await collected(world, output_tokens=9)

    world = in_world(scenario)
    assert [event.data.output_tokens for event in world.usage.recorded] == [1, 1, 1]
    assert [event.data.input_tokens for event in world.usage.recorded] == [10, 0, 0]


def test_prompt_on_one_node_and_the_rest_on_another() -> None:
    """The first token comes from the prefill node, whose blocks the decode node's kvstore is told to take from the
    beginning, and which are held under the attempt's name; decode gets the token and the peer. One attempt, one event,
    of the decode node; the finish also names where the prompt ran, and how long the hand-over took."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.placements = [PREFILL, DECODE]
        world.node.interval_ms = 10
        events = await collected(world, output_tokens=4)
        assert text_of(events) == "tok0 tok1 tok2 tok3 "

    world = in_world(scenario)
    assert world.node.placements == ["p1", "d1"]
    first, then = world.node.calls
    assert isinstance(first, EngineRequest)
    assert isinstance(then, EngineRequest)
    assert (first.phase, then.phase, then.resumed_token_ids) == ("prefill", "decode", (0,))
    assert (then.kv_peers, then.kv_hold) == (("127.0.0.1:7",), "r1/1")
    [(address, held)] = world.holds.held
    assert (address, held.handle, held.keys, held.salt) == ("127.0.0.1:7", "r1/1", (b"k1", b"k2"), b"\x00")
    [event] = world.usage.recorded
    assert (billed(event), event.data.node_id, event.data.cached_tokens) == ((Outcome.DONE, 10, 4), "d1", 4)
    [finish] = world.scheduler.finishes
    assert (finish.node_id, finish.first_token_node_id) == ("d1", "p1")
    assert finish.handoff_ms >= 1
    [(source, target, moved)] = world.holds.begun
    assert (source, target, moved) == ("127.0.0.1:7", "127.0.0.1:8", held)
    assert world.holds.ended == ["r1/1"]


def test_choices_and_prompts_of_one_request_end_no_hold_but_their_own() -> None:
    """Two choices of one prompt, and a call with another prompt: each transfer has a name of its own, and what is moved
    ahead are blocks of the prompt that they are keys of. The other prompt's are fetched when they are asked for."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.placements = [PREFILL, DECODE]
        work = world.work(resumable=True, choices=2, output_tokens=3)
        first = work.calls[0]
        assert isinstance(first, EngineRequest)
        other = replace(first, prompt_token_ids=(7, 8, 9))
        await collect(world, replace(work, calls=(*work.calls, other)))

    world = in_world(scenario)
    moved = {held.handle: held.keys for _, _, held in world.holds.begun}
    assert moved == {"r1/1": (b"k1", b"k2"), "r1/1/2": (b"k1", b"k2"), "r1/1/3": ()}
    assert sorted(world.holds.ended) == sorted(moved)
    asked = [call.kv_hold for call in world.node.calls if isinstance(call, EngineRequest) and call.phase == "decode"]
    assert sorted(asked) == sorted(moved)


def test_one_token_needs_no_second_node() -> None:
    """The prefill's token is the whole answer: decode is not asked, nothing is held."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.placements = [PREFILL, DECODE]
        assert text_of(await collected(world, output_tokens=1)) == "tok0 "

    world = in_world(scenario)
    assert world.node.placements == ["p1"]
    assert (world.holds.held, world.holds.ended) == ([], ["r1/1"])


def test_a_decode_node_that_refuses_costs_no_character() -> None:
    """Decode fails before its first token: the next attempt goes on from the prefill's token, and the prompt is billed
    once."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.placements = [PREFILL, DECODE]
        world.node.fail_after, world.node.failures_left = 1, 1
        assert text_of(await collected(world, output_tokens=4)) == "tok0 tok1 tok2 tok3 "

    world = in_world(scenario)
    assert world.node.placements == ["p1", "d1", "d1"]
    assert world.holds.ended == ["r1/1"]
    assert [billed(event) for event in world.usage.recorded] == [(Outcome.FAILED, 10, 1), (Outcome.DONE, 0, 3)]


def test_a_prefill_node_that_dies_is_tried_again_from_the_beginning() -> None:
    """Nothing was seen: the second attempt begins with the prompt; the first one costs nothing, and nobody waits for
    its blocks any more."""

    async def scenario(world: GatewayWorld) -> None:
        world.scheduler.placements = [PREFILL, DECODE]
        world.node.fail_after, world.node.failures_left = 0, 1
        assert text_of(await collected(world, output_tokens=3)) == "tok0 tok1 tok2 "

    world = in_world(scenario)
    assert world.node.placements == ["p1", "p1", "d1"]
    assert world.holds.ended == ["r1/1", "r1/2"]
    assert [held.handle for _, held in world.holds.held] == ["r1/2"]
    assert [billed(event) for event in world.usage.recorded] == [(Outcome.FAILED, 0, 0), (Outcome.DONE, 10, 3)]


def test_token_ids_are_little_endian_int32() -> None:
    """What the engine's tensor holds, and what the next engine gets."""
    assert token_ids_of(struct.pack("<3i", 1, 70_000, 2)) == (1, 70_000, 2)
