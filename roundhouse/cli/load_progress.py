"""A progress bar for a load that the admin API is asked to make: bytes and the loader's own estimate.

The call that loads answers only at its end, so this asks the nodes meanwhile what they say of the model.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from roundhouse.cli.admin_client import AdminApi, Refused

LOOK_S = 0.5  # nodes tell their state each second, and on change
MOVING = ("staging", "loading")

Answer = TypeVar("Answer")


def with_progress(api: AdminApi, model: str, work: Callable[[], Answer], console: Console) -> Answer:
    """Do `work`, showing what the nodes say of `model` meanwhile. Shows nothing where nobody looks (a pipe)."""
    if not console.is_terminal:
        return work()
    ended = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("asked", total=None, left="")
        watcher = threading.Thread(target=_watch, args=(api, model, progress, bar, ended), daemon=True)
        watcher.start()
        try:
            return work()
        finally:
            ended.set()
            watcher.join()


def _watch(api: AdminApi, model: str, progress: Progress, bar: TaskID, ended: threading.Event) -> None:
    while not ended.wait(LOOK_S):
        with suppress(Refused):  # the answer of the work itself is what counts
            found = moving_instance(api.get("/nodes")["nodes"], model)
            if found is not None:
                progress.update(bar, **describe(found))


def moving_instance(nodes: list[dict[str, Any]], model: str) -> dict[str, Any] | None:
    """The first instance of a model that is on its way, with its node."""
    for node in nodes:
        for instance in node["instances"]:
            if instance["model"] == model and (instance["state"] in MOVING or instance["bytes_total"]):
                return {**instance, "node": node["node_id"]}
    return None


def describe(instance: dict[str, Any]) -> dict[str, Any]:
    """What the bar shows of an instance: fields of rich's `Progress.update`."""
    left_ms = instance["estimated_remaining_ms"]
    return {
        "description": f"{instance['state']} on {instance['node']}",
        "completed": instance["bytes_done"],
        "total": instance["bytes_total"] or None,
        "left": f"about {left_ms / 1000:.1f} s left" if left_ms else "",
    }
