"""Wherever streams are cut, what the client reads is what it reads undisturbed. The gateway's production code over the
reference engine: choices, multi-byte characters, stop strings over the cut, logprobs, seeds, usage, one node or two."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.reference.intake import CallInputs, accept_call
from engines.reference.loaded_model import LoadedModel
from engines.reference.response import join_tokens
from engines.reference.sequence import TokenGenerated
from roundhouse.vocabulary import Outcome
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.adapters.triton_tensors import _details
from services.gateway.operations.accounting import Work
from services.gateway.operations.engine_streams import Produced
from services.gateway.ports import EngineChunk, EngineRequest, NodeLost, TensorReply, TensorRequest
from tests.builders.checkpoints import random_checkpoint
from tests.unit.engines.engine_driver import open_model, run_requests
from tests.unit.gateway.gateway_world import GatewayWorld
from tests.unit.gateway.scenarios import collect, in_world

PREFILL = wire.Placement(node_id="p1", triton_grpc_address="127.0.0.1:1", triton_model_name="m--0")
DECODE = wire.Placement(node_id="d1", triton_grpc_address="127.0.0.1:2", triton_model_name="m--0")
PROMPT = tuple(range(5, 25))
CHARACTERS = "aďž🌍你 "  # one, two, three and four bytes; one token a byte, whose id is 5 more
BIAS = {str(5 + byte): 60 for byte in sorted(set(CHARACTERS.encode()))}  # now and then whole characters, mostly not
TOKENS = 24


@dataclass
class EngineNode:
    """`InferenceNode` over the engine; call i, from 0, is lost after `cuts[i]` tokens. Sends `joined` at once."""

    model: LoadedModel
    cuts: list[int | None] = field(default_factory=list)
    joined: int = 1
    calls: int = 0

    async def generate(
        self, placement: wire.Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `InferenceNode.generate`."""
        cut = self.cuts[self.calls] if self.calls < len(self.cuts) else None
        self.calls += 1
        for number, chunk in enumerate(self._answer(request)):
            if cut is not None and number * self.joined >= cut:
                raise NodeLost("The node that ran the request failed.")
            yield chunk

    async def infer(self, placement: wire.Placement, request: TensorRequest, *, timeout_ms: int) -> TensorReply:
        """Never."""
        raise AssertionError("no tensors here")

    def _answer(self, request: EngineRequest) -> Iterator[EngineChunk]:
        flags = dict.fromkeys(("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True)
        inputs = CallInputs(
            "",
            request.sampling_parameters,
            json.dumps(_details(request)),
            stream=True,
            return_logprobs=request.return_logprobs,
            **flags,
        )
        call = accept_call(self.model, inputs)
        events = run_requests(self.model, [call.request])[0].events
        assert all(isinstance(event, TokenGenerated) for event in events)
        for first in range(0, len(events), self.joined):
            part: Any = events[first : first + self.joined]
            values = join_tokens(call, self.model.tokens, part, first == 0)
            yield EngineChunk(
                text=values.text_output,
                output_tokens=values.num_output_tokens or 0,
                input_tokens=values.num_input_tokens,
                finish_reason=None if values.finish_reason == "null" else values.finish_reason,
                logprobs=values.logprobs,
                token_ids=values.token_ids.tobytes() if values.token_ids is not None else b"",
            )


@dataclass(frozen=True)
class Read:
    """What a client reads of one choice."""

    text: str
    finish: str | None
    logprobs: list[Any]
    tokens: int


@dataclass(frozen=True)
class Wish:
    """What it asks for."""

    choices: int
    sampling: dict[str, Any]
    stops: tuple[str, ...]

    def work(self, world: GatewayWorld) -> Work:
        """One call a choice, each with a seed of its own, as the gateway makes them."""
        work = world.work(resumable=True, choices=self.choices, output_tokens=TOKENS)
        seed = self.sampling.get("seed")
        calls = tuple(
            replace(
                call,
                prompt_token_ids=PROMPT,
                salt="",
                return_logprobs=True,
                sampling_parameters=json.dumps(
                    {
                        **self.sampling,
                        **({} if seed is None else {"seed": seed + number}),
                        "max_tokens": TOKENS,
                        "logprobs": 2,
                        "logit_bias": BIAS,
                        "ignore_eos": True,
                        "stop": list(self.stops),
                    }
                ),
            )
            for number, call in enumerate(work.calls)
            if isinstance(call, EngineRequest)
        )
        return replace(work, calls=calls, input_tokens=len(PROMPT), block_keys=())


def read(node: EngineNode, wish: Wish, placements: Sequence[wire.Placement] = ()) -> tuple[list[Read], GatewayWorld]:
    """Run a request to its end."""
    answers: list[Read] = []

    async def scenario(world: GatewayWorld) -> None:
        world.parts = replace(world.parts, node=node)
        if placements:
            world.scheduler.placements = list(placements)
        pieces: list[list[EngineChunk]] = [[] for _ in range(wish.choices)]
        for event in await collect(world, wish.work(world)):
            if isinstance(event, Produced) and isinstance(event.piece, EngineChunk):
                pieces[event.index].append(event.piece)
        for each in pieces:
            logprobs = [entry for piece in each for entry in json.loads(piece.logprobs or "[]")]
            tokens = sum(piece.output_tokens for piece in each)
            answers.append(Read("".join(piece.text for piece in each), each[-1].finish_reason, logprobs, tokens))

    return answers, in_world(scenario)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One random model."""
    return open_model(random_checkpoint(tmp_path_factory.mktemp("random") / "m", 3))


SAMPLINGS = st.one_of(
    st.just({"temperature": 0}),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.7, 1.0, 1.6]), "seed": st.integers(-(2**40), 2**40)},
        optional={
            "top_p": st.sampled_from([0.5, 0.95]),
            "top_k": st.sampled_from([3, 40]),
            "min_p": st.sampled_from([0.05]),
            "presence_penalty": st.sampled_from([-1.0, 1.5]),
            "frequency_penalty": st.sampled_from([0.7]),
            "repetition_penalty": st.sampled_from([1.3]),
            "min_tokens": st.sampled_from([5, 20]),
        },
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), sampling=SAMPLINGS, choices=st.integers(1, 3), joined=st.integers(1, 4))
def test_what_is_read_over_cuts_is_what_is_read_without(
    model: LoadedModel, data: st.DataObject, sampling: dict[str, Any], choices: int, joined: int
) -> None:
    """Invariant 13, case B31. Up to two of three attempts are lost, wherever their streams are; a stop string is taken
    out of the text itself, so that it lies over cuts; the prompt may run on another node. Text, finish reason, logprobs
    and tokens of each choice are those of an undisturbed run, and the bill has each token and the prompt once."""
    whole, _ = read(EngineNode(model), Wish(choices, sampling, ()))
    length = data.draw(st.integers(0, 6))
    start = data.draw(st.integers(0, max(0, len(whole[0].text) - 1)))
    stop = whole[0].text[start : start + length].replace("\ufffd", "")
    wish = Wish(choices, sampling, (stop,) if stop else ())
    undisturbed, _ = read(EngineNode(model), wish)
    cuts: list[int | None] = data.draw(st.lists(st.one_of(st.none(), st.integers(0, TOKENS)), max_size=3 * choices))
    lost = 0
    for number, cut in enumerate(cuts):  # at most two attempts may be lost
        lost += cut is not None
        cuts[number] = cut if lost <= 2 else None
    placements = data.draw(st.sampled_from([(), (PREFILL, DECODE)]))
    disturbed, world = read(EngineNode(model, cuts, joined), wish, placements)
    assert disturbed == undisturbed
    billed = [(event.data.input_tokens, event.data.output_tokens) for event in world.usage.recorded]
    assert sum(output for _, output in billed) == sum(each.tokens for each in undisturbed)
    assert sum(given for given, _ in billed) == len(PROMPT)
    assert [Outcome.from_wire(event.data.outcome) for event in world.usage.recorded][-1] is Outcome.DONE
