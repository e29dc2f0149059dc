"""The engine's threads: slow callers get joined responses, gone callers are forgotten, broken ones hurt nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event as Flag

import pytest

from engines.reference.engine_loop import EngineLoop, is_final
from engines.reference.loaded_model import LoadedModel
from engines.reference.sequence import Event, Failed, TokenGenerated
from tests.builders.checkpoints import random_checkpoint
from tests.unit.engines.engine_driver import make_request, open_model, run_one

LIMIT_S = 10.0


class RecordingReply:
    """Keeps what it is sent; may be told to stall, to break, or that its caller is gone."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.sends: list[list[Event]] = []
        self.ended = Flag()
        self.first_send = Flag()
        self.may_go_on = Flag()
        self.may_go_on.set()
        self.cancelled = Flag()
        self.breaks = breaks
        self.closed = Flag()

    def send(self, events: Sequence[Event]) -> None:
        self.sends.append(list(events))
        self.first_send.set()
        if self.breaks:
            raise ConnectionError("gone")
        assert self.may_go_on.wait(LIMIT_S)
        if is_final(events[-1]):
            self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    def abandoned(self) -> None:
        self.closed.set()
        self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for sent in self.sends for event in sent if isinstance(event, TokenGenerated)]


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    """A small model."""
    return open_model(random_checkpoint(tmp_path / "m", 1))


@pytest.fixture
def reports() -> list[str]:
    """What the loop reported."""
    return []


@pytest.fixture
def loop(model: LoadedModel, reports: list[str]) -> Iterator[EngineLoop]:
    """A running loop."""
    running = EngineLoop(model.engine, reports.append)
    running.start()
    yield running
    running.close()


def test_a_slow_caller_gets_ready_tokens_joined(model: LoadedModel, loop: EngineLoop, tmp_path: Path) -> None:
    """While the first send stalls, the others are computed; they come in fewer sends, complete and in order."""
    slow, other = RecordingReply(), RecordingReply()
    slow.may_go_on.clear()
    loop.submit(make_request(model, "prompt", max_tokens=40), slow)
    assert slow.first_send.wait(LIMIT_S)
    loop.submit(make_request(model, "prompt", max_tokens=5), other)
    slow.may_go_on.set()
    assert slow.ended.wait(LIMIT_S)
    assert other.ended.wait(LIMIT_S)
    expected = run_one(open_model(random_checkpoint(tmp_path / "same", 1)), "prompt", max_tokens=40).token_ids
    assert slow.token_ids == expected
    assert other.token_ids == expected[:5]


def test_a_caller_that_goes_away_frees_its_slot(model: LoadedModel, loop: EngineLoop) -> None:
    """A request for 400 tokens ends early when its caller is gone; nothing is held afterwards."""
    reply, after = RecordingReply(), RecordingReply()
    loop.submit(make_request(model, "x", max_tokens=400, ignore_eos=True), reply)
    assert reply.first_send.wait(LIMIT_S)
    reply.cancelled.set()
    assert reply.ended.wait(LIMIT_S)
    assert len(reply.token_ids) < 400
    loop.submit(make_request(model, "x", max_tokens=3), after)
    assert after.ended.wait(LIMIT_S)
    statistics = model.engine.statistics()
    assert (statistics.running, statistics.blocks_free) == (0, statistics.blocks_total)


def test_a_reply_that_raises_ends_its_own_request_only(
    model: LoadedModel, loop: EngineLoop, reports: list[str]
) -> None:
    """It is reported once and its stream is closed; the neighbour gets all its tokens."""
    broken, well = RecordingReply(breaks=True), RecordingReply()
    loop.submit(make_request(model, "x", max_tokens=100, ignore_eos=True), broken)
    loop.submit(make_request(model, "x", max_tokens=100, ignore_eos=True), well)
    assert well.ended.wait(LIMIT_S)
    assert len(well.token_ids) == 100
    assert len(broken.sends) == 1
    assert len(reports) == 1
    assert broken.closed.is_set()


class LastSendBreaks(RecordingReply):
    """The response that should end the stream does not go out."""

    def send(self, events: Sequence[Event]) -> None:
        if is_final(events[-1]):
            raise ConnectionError("no memory for the response")
        super().send(events)


def test_a_stream_whose_last_response_does_not_go_out_is_closed_all_the_same(
    model: LoadedModel, loop: EngineLoop
) -> None:
    """Triton waits for the end of each stream before it unloads a model: for ever."""
    reply = LastSendBreaks()
    loop.submit(make_request(model, "x", max_tokens=3), reply)
    assert reply.closed.wait(LIMIT_S)


def test_a_caller_who_has_gone_before_the_engine_knows_of_him_costs_nothing(
    model: LoadedModel, loop: EngineLoop
) -> None:
    """A hundred requests for 400 tokens beside one that runs, each gone when it comes: none is computed to its end."""
    busy = RecordingReply()
    loop.submit(make_request(model, "x", max_tokens=400, ignore_eos=True), busy)
    gone = [RecordingReply() for _ in range(100)]
    for reply in gone:
        reply.cancelled.set()
        loop.submit(make_request(model, "x", max_tokens=400, ignore_eos=True), reply)
    assert all(reply.ended.wait(LIMIT_S) for reply in gone)
    busy.cancelled.set()
    assert busy.ended.wait(LIMIT_S)
    after = RecordingReply()
    loop.submit(make_request(model, "x", max_tokens=1), after)
    assert after.ended.wait(LIMIT_S)
    assert model.engine.statistics().running == 0


@pytest.mark.parametrize("fault", ["is_cancelled", "abandoned"])
def test_a_caller_that_cannot_even_be_left_ends_its_own_request_only(
    model: LoadedModel, loop: EngineLoop, reports: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Triton fails when it is asked whether a caller is gone, or told that it is: reported; the others go on."""
    broken, well = RecordingReply(), RecordingReply()
    raised = Flag()

    def fail() -> bool:
        raised.set()
        raise RuntimeError("the response sender is closed")

    monkeypatch.setattr(broken, fault, fail)
    broken.cancelled.set()
    loop.submit(make_request(model, "x", max_tokens=400, ignore_eos=True), broken)
    assert raised.wait(LIMIT_S)
    loop.submit(make_request(model, "x", max_tokens=50, ignore_eos=True), well)
    assert well.ended.wait(LIMIT_S)
    assert len(well.token_ids) == 50
    assert reports
    assert model.engine.statistics().running == 0


def test_a_step_that_raises_fails_what_runs_and_the_loop_goes_on(
    model: LoadedModel, loop: EngineLoop, reports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that belongs to no request: the running one is told, the next one works."""
    forward = model.engine._decoder.forward
    monkeypatch.setattr(model.engine._decoder, "forward", lambda segments: 1 / 0)
    failed, after = RecordingReply(), RecordingReply()
    loop.submit(make_request(model, "x"), failed)
    assert failed.ended.wait(LIMIT_S)
    assert [event for sent in failed.sends for event in sent] == [
        Failed(failed.sends[0][0].request_id, "engine_fault: ZeroDivisionError")
    ]
    monkeypatch.setattr(model.engine._decoder, "forward", forward)
    loop.submit(make_request(model, "x", max_tokens=3), after)
    assert after.ended.wait(LIMIT_S)
    assert len(after.token_ids) == 3
    assert len(reports) == 1
