"""The life of a model version on a node as one pure function: instance and event in, instance and command out.

Idempotent: a repeated command or a late event changes nothing. The newest generation wins: a load followed by an unload
ends not ready, an unload followed by a load ends ready, whatever was under way (case B17). It moves no bytes; whoever
calls it does what the command says and keeps the ledger.
"""

from dataclasses import replace
from typing import assert_never

from services.loader.domain import instance as words
from services.loader.domain.backoff import retry_delay_ms
from services.loader.domain.instance import BackingOff, Command, Event, Instance, Moved, Order, Stale, State, Step


def advance(instance: Instance, event: Event, now_ms: int) -> Step:
    """What `event` makes of `instance`. Only commands from callers can be refused."""
    match event:
        case words.LoadCommanded():
            return _load_commanded(instance, event, now_ms)
        case words.UnloadCommanded():
            return _unload_commanded(instance, event, now_ms)
        case words.Admitted() | words.NotAdmitted() | words.Staged() | words.StageFailed():
            return _on_the_way_in(instance, event, now_ms)
        case words.Loaded() | words.LoadFailed() | words.Unloaded():
            return _triton_answered(instance, event, now_ms)
        case words.Claimed() | words.Unclaimed() | words.DrainElapsed():
            return _on_the_way_out(instance, event, now_ms)
        case words.Lost() | words.Adopted() | words.FoundLeaving() | words.FoundOnDisk() | words.DroppedFromDisk():
            return _found_out(instance, event, now_ms)
        case _:
            assert_never(event)


def _load_commanded(instance: Instance, event: words.LoadCommanded, now_ms: int) -> Step:
    if _is_stale(instance, event.generation, Order.LOAD):
        return Stale(instance.generation)
    failed = instance.state is State.FAILED or (instance.state is State.UNLOADING and instance.reason != "")
    if failed and (instance.state is State.UNLOADING or (now_ms < instance.retry_at_ms and not event.force)):
        return BackingOff(instance.reason, instance.retry_at_ms)
    asked = replace(instance, wanted=True, generation=event.generation, order=Order.LOAD)
    if asked.state.is_at_rest:
        return _admit(asked, now_ms)
    if asked.state is State.DRAINING:
        return Moved(_to(asked, State.READY, now_ms))
    return Moved(asked)  # on its way, ready, or (UNLOADING) loaded again as soon as it is gone


def _unload_commanded(instance: Instance, event: words.UnloadCommanded, now_ms: int) -> Step:
    if _is_stale(instance, event.generation, Order.UNLOAD):
        return Stale(instance.generation)
    asked = replace(instance, wanted=False, generation=event.generation, order=Order.UNLOAD)
    if asked.state is State.READY:
        return Moved(_to(asked, State.DRAINING, now_ms), Command.DRAIN)
    if asked.state is State.FAILED:
        return Moved(_rest(asked, now_ms))  # an unload forgets the failure
    return Moved(asked)


def _is_stale(instance: Instance, generation: int, order: Order) -> bool:
    if generation == instance.generation:
        return instance.order not in (Order.NONE, order)
    return generation < instance.generation


def _on_the_way_in(
    instance: Instance, event: words.Admitted | words.NotAdmitted | words.Staged | words.StageFailed, now_ms: int
) -> Moved:
    match event, instance.state:
        case words.Admitted(), State.ADMITTING if instance.wanted:
            return Moved(_to(instance, State.STAGING, now_ms), Command.STAGE)
        case words.Staged(), State.STAGING:
            staged = replace(instance, on_disk=True, stage_ms=event.stage_ms)
            if staged.wanted:
                return Moved(_to(staged, State.LOADING, now_ms), Command.LOAD)
            return Moved(_rest(staged, now_ms))
        case words.StageFailed(), State.STAGING if instance.wanted:
            return Moved(_failed(_with_failure(replace(instance, on_disk=False), event.reason, now_ms), now_ms))
        case (words.Admitted() | words.NotAdmitted(), State.ADMITTING) | (words.StageFailed(), State.STAGING):
            return Moved(_rest(instance, now_ms))
        case _:
            return Moved(instance)


def _triton_answered(instance: Instance, event: words.Loaded | words.LoadFailed | words.Unloaded, now_ms: int) -> Moved:
    match event, instance.state:
        case words.Loaded(), State.LOADING:
            loaded = replace(instance, load_ms=event.load_ms, reason="", failures=0, retry_at_ms=0)
            if loaded.wanted:
                return Moved(_to(loaded, State.READY, now_ms))
            return Moved(_to(loaded, State.UNLOADING, now_ms), Command.UNLOAD)
        case words.LoadFailed(), State.LOADING:
            failed = _with_failure(instance, event.reason, now_ms)
            return Moved(_to(failed, State.UNLOADING, now_ms), Command.UNLOAD)
        case words.Unloaded(), State.UNLOADING if instance.reason and instance.wanted:
            return Moved(_failed(instance, now_ms))
        case words.Unloaded(), State.UNLOADING if instance.wanted:
            return _admit(instance, now_ms)
        case words.Unloaded(), State.UNLOADING:
            return Moved(_rest(instance, now_ms))
        case _:
            return Moved(instance)


def _on_the_way_out(
    instance: Instance, event: words.Claimed | words.Unclaimed | words.DrainElapsed, now_ms: int
) -> Moved:
    match event, instance.state:
        case words.Claimed(), State.READY:
            return Moved(_to(replace(instance, wanted=False), State.DRAINING, now_ms))
        case words.Unclaimed(), State.DRAINING if instance.order is not Order.UNLOAD:
            return Moved(_to(replace(instance, wanted=True), State.READY, now_ms))
        case words.Unclaimed(), State.DRAINING:
            return Moved(_to(instance, State.UNLOADING, now_ms), Command.UNLOAD)  # an unload came meanwhile
        case words.DrainElapsed(), State.DRAINING if instance.steps == event.steps:
            return Moved(_to(instance, State.UNLOADING, now_ms), Command.UNLOAD)
        case _:
            return Moved(instance)


def _found_out(
    instance: Instance,
    event: words.Lost | words.Adopted | words.FoundLeaving | words.FoundOnDisk | words.DroppedFromDisk,
    now_ms: int,
) -> Moved:
    at_rest = instance.state.is_at_rest
    match event:
        case words.Lost() if instance.state in (State.READY, State.DRAINING):
            return Moved(_rest(instance, now_ms))
        case words.Adopted() if at_rest:
            return Moved(_to(replace(instance, wanted=True, reason="", failures=0), State.READY, now_ms))
        case words.FoundLeaving() if at_rest:
            return Moved(_to(replace(instance, wanted=False), State.UNLOADING, now_ms), Command.UNLOAD)
        case words.FoundOnDisk() | words.DroppedFromDisk():
            known = replace(instance, on_disk=isinstance(event, words.FoundOnDisk))
            resting = known.state in (State.REGISTERED, State.STAGED)
            return Moved(_rest(known, now_ms) if resting else known)
        case _:
            return Moved(instance)


def _admit(instance: Instance, now_ms: int) -> Moved:
    begun = replace(instance, attempt=instance.attempt + 1, reason="")
    return Moved(_to(begun, State.ADMITTING, now_ms), Command.ADMIT)


def _with_failure(instance: Instance, reason: str, now_ms: int) -> Instance:
    failures = instance.failures + 1
    return replace(instance, reason=reason, failures=failures, retry_at_ms=now_ms + retry_delay_ms(failures))


def _failed(instance: Instance, now_ms: int) -> Instance:
    return _to(replace(instance, wanted=False), State.FAILED, now_ms)


def _rest(instance: Instance, now_ms: int) -> Instance:
    quiet = replace(instance, wanted=False, reason="", retry_at_ms=0)
    if quiet.state is State.FAILED or instance.order is Order.UNLOAD:
        quiet = replace(quiet, failures=0)
    return _to(quiet, State.STAGED if quiet.on_disk else State.REGISTERED, now_ms)


def _to(instance: Instance, state: State, now_ms: int) -> Instance:
    if state is instance.state:
        return instance
    return replace(instance, state=state, since_ms=now_ms, steps=instance.steps + 1)
