"""The two threads of an engine: one computes steps, one talks to the callers.

```
intake --submit--> inbox --> [step thread] --events--> outbox --> [reply thread] --> Reply.send
                     ^------------- cancelled ids ------------------------'
```

A slow caller never delays a step: its events gather in the outbox, and everything that is ready for one request goes
out as one send. Fifty times a second, after a step, the reply thread asks every open request whether it was cancelled,
and the step thread forgets those before its next step. A reply that raises ends that request alone; its caller's stream
is closed as far as it still can be, because Triton never unloads a model that owes an answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Protocol

from engines.reference.sequence import Event, GenerationRequest, TokenGenerated
from engines.reference.step_engine import StepEngine

# The step thread computes without a pause; with CPython's 5 ms a reply would wait that long for the interpreter.
SWITCH_INTERVAL_S = 0.0005
# Between two looks for callers that are gone. Each is a call to Triton's own process and back for every open request:
# after each step of a small model they took as much of the core as the answers.
LOOK_INTERVAL_S = 0.02


class Reply(Protocol):
    """The way back to one caller. Used by the reply thread only."""

    def send(self, events: Sequence[Event]) -> None:
        """Send everything that has become ready; the last event of a request is final."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the caller is gone."""
        ...

    def abandoned(self) -> None:
        """The engine has dropped the request because it was cancelled; nothing more is sent."""
        ...


def is_final(event: Event) -> bool:
    """Whether nothing follows this event."""
    return event.finish is not None if isinstance(event, TokenGenerated) else True


class EngineLoop:
    """Runs a `StepEngine` until closed. `report` hears of faults that belong to no request."""

    def __init__(self, engine: StepEngine, report: Callable[[str], None]) -> None:
        """Nothing runs before `start`."""
        self._engine = engine
        self._report = report
        self._inbox: list[tuple[GenerationRequest, float]] = []
        self._cancelled: list[str] = []
        self._stopping = False
        self._work = Condition()
        self._outbox: dict[str, list[Event]] = {}
        self._replies: dict[str, Reply] = {}
        self._stepped = False
        self._look_at_s = 0.0
        self._news = Condition()
        self._threads = (Thread(target=self._step_forever), Thread(target=self._reply_forever))

    def start(self) -> None:
        """Start both threads."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for thread in self._threads:
            thread.daemon = True  # a server that dies must not wait for a step
            thread.start()

    def close(self) -> None:
        """Stop after the current step and wait for both threads; open requests are dropped."""
        with self._work:
            self._stopping = True
            self._work.notify()
        self._threads[0].join()
        with self._news:
            self._news.notify()
        self._threads[1].join()

    def submit(self, request: GenerationRequest, reply: Reply) -> None:
        """Queue a checked request; `request_id` must be new. Thread-safe."""
        with self._work:  # held over both: else a caller that is gone already could be forgotten before it is known
            with self._news:
                self._replies[request.request_id] = reply
            self._inbox.append((request, time.monotonic()))
            self._work.notify()

    def _step_forever(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._inbox or self._cancelled or self._stopping or self._engine.has_work)
                if self._stopping:
                    return
                arrived, self._inbox = self._inbox, []
                cancelled, self._cancelled = self._cancelled, []
            for request, now_s in arrived:
                self._engine.submit(request, now_s)
            self._engine.cancel(cancelled)
            self._publish(self._step())

    def _step(self) -> list[Event]:
        try:
            return self._engine.step()
        except Exception as error:  # noqa: BLE001 - the loop must outlive any fault of one step
            self._report(f"engine step failed: {error!r}")
            return self._engine.fail_all(f"engine_fault: {type(error).__name__}")

    def _publish(self, events: list[Event]) -> None:
        with self._news:
            for event in events:
                self._outbox.setdefault(event.request_id, []).append(event)
            self._stepped = True
            self._news.notify()

    def _reply_forever(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._stepped or self._stopping)
                if self._stopping:
                    return
                ready, self._outbox = self._outbox, {}
                self._stepped = False
            for request_id, events in ready.items():
                self._send(request_id, events)
            if time.monotonic() >= self._look_at_s:
                self._look_for_cancelled()
                self._look_at_s = time.monotonic() + LOOK_INTERVAL_S

    def _send(self, request_id: str, events: Sequence[Event]) -> None:
        reply = self._replies.get(request_id)
        if reply is None:
            return  # cancelled while the step ran
        try:
            reply.send(events)
        except Exception as error:  # noqa: BLE001 - one broken reply must not stop the others
            self._report(f"reply failed: {error!r}")
            self._abandon([request_id])
            return
        if is_final(events[-1]):
            del self._replies[request_id]

    def _look_for_cancelled(self) -> None:
        gone = [request_id for request_id, reply in list(self._replies.items()) if self._is_gone(reply)]
        if gone:
            self._abandon(gone)

    def _is_gone(self, reply: Reply) -> bool:
        try:
            return reply.is_cancelled()
        except Exception as error:  # noqa: BLE001 - who cannot be asked cannot be answered; the thread goes on
            self._report(f"a caller cannot be asked: {error!r}")
            return True

    def _abandon(self, request_ids: Sequence[str]) -> None:
        replies = [self._replies[request_id] for request_id in request_ids]
        self._drop(request_ids)
        for reply in replies:
            try:
                reply.abandoned()
            except Exception as error:  # noqa: BLE001 - one that is closed already
                self._report(f"a reply cannot be closed: {error!r}")

    def _drop(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._replies[request_id]
        with self._work:
            self._cancelled.extend(request_ids)
            self._work.notify()
