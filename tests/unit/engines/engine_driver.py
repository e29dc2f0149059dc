"""Runs the reference engine step by step, without threads, Triton or a clock that passes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.reference.intake import CallInputs, accept_call
from engines.reference.loaded_model import LoadedModel, load_model
from engines.reference.sequence import Embedded, Event, Failed, GenerationRequest, TokenGenerated

STEPS_MAX = 20_000  # more than any test needs: a run that does not end is a failure, not a hang


@dataclass
class Outcome:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text together."""
        return "".join(self.pieces)


def open_model(folder: Path, *, slots: int = 4, kv_pool_tokens: int = 4096, **parameters: str) -> LoadedModel:
    """Load a checkpoint as Triton would have it loaded."""
    given = {"weights_path": str(folder), "slots": str(slots), "kv_pool_tokens": str(kv_pool_tokens)}
    return load_model({**given, **parameters})


def make_request(
    model: LoadedModel, prompt: str | Sequence[int], *, details: Mapping[str, Any] | None = None, **params: Any
) -> GenerationRequest:
    """A checked request, greedy unless told otherwise; `prompt` is text or token ids."""
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 16, **params}
    extra = dict(details or {})
    if not isinstance(prompt, str):
        extra["prompt_token_ids"] = list(prompt)
    text = prompt if isinstance(prompt, str) else ""
    return accept_call(model, CallInputs(text, json.dumps(given), json.dumps(extra))).request


def run_requests(
    model: LoadedModel, requests: Sequence[GenerationRequest], *, arrivals_apart: int = 0
) -> list[Outcome]:
    """Submit the requests, each `arrivals_apart` steps after the one before, and step until all have ended."""
    outcomes = {request.request_id: Outcome() for request in requests}
    waiting = list(requests)
    for step in range(STEPS_MAX):
        while waiting and step >= (len(requests) - len(waiting)) * arrivals_apart:
            model.engine.submit(waiting.pop(0), 0.0)
        if not waiting and not model.engine.has_work:
            return [outcomes[request.request_id] for request in requests]
        for event in model.engine.step():
            record(outcomes[event.request_id], event)
    raise AssertionError("the engine did not finish")


def record(outcome: Outcome, event: Event) -> None:
    """Add one event to what a request gave."""
    outcome.events.append(event)
    if isinstance(event, TokenGenerated):
        outcome.token_ids.append(event.token_id)
        outcome.pieces.append(event.text)
        outcome.finish = event.finish
        outcome.cached_tokens = event.cached_tokens
    elif isinstance(event, Failed):
        outcome.error = event.error
    else:
        assert isinstance(event, Embedded)


def run_one(model: LoadedModel, prompt: str | Sequence[int], **params: Any) -> Outcome:
    """One request by itself."""
    return run_requests(model, [make_request(model, prompt, **params)])[0]
