"""`roundhouse models`: where models stand, and loading or unloading one by hand."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from roundhouse.cli.admin_client import AdminKey, AdminUrl, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_rows
from roundhouse.cli.load_progress import with_progress

COLUMNS = ("name", "engine", "pool", "pinned", "node", "state", "device_bytes", "load_ms", "reason")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="See, load and unload models."
)

Node = Annotated[str, typer.Option("--node", help="On this node only.")]


@app.command(name="list")
def list_models(
    loaded: Annotated[bool, typer.Option("--loaded", help="Only those that stand on a node.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """List models, with their state on each node that has them."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        found = api.get("/catalogue", kind="models")
        models, pins = found["models"], found["pins"]
        nodes = api.get("/nodes")["nodes"]
        rows = [row for model in models for row in _rows(model, pins, nodes) if row["node"] or not loaded]
        show_rows(rows, COLUMNS, output)


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="The model.")],
    node: Node = "",
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Make a model ready, on the best node if none is named. Waits until it is."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        answer = with_progress(
            api, name, lambda: api.post(f"/models/{part(name)}/load", node=node), Console(stderr=True)
        )
        for place in answer["nodes"]:
            typer.echo(f"{name} is ready on {place['node']}" + ("" if place["loaded"] else " (it was already)"))


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="The model.")],
    tier: Annotated[str, typer.Option("--tier", help="How near: host (memory) or disk.")] = "host",
    node: Node = "",
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Bring a model's weights nearer without loading it, so that a load costs only the way to the device."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        path = f"/models/{part(name)}/stage"
        answer = with_progress(api, name, lambda: api.post(path, node=node, tier=tier), Console(stderr=True))
        for place in answer["nodes"]:
            typer.echo(f"{name} is in the {tier} tier of {place['node']}")


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="The model.")],
    node: Node = "",
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Drain a model and free its memory, everywhere if no node is named."""
    with refusals_told():
        answer = open_api(admin_url, admin_key).post(f"/models/{part(name)}/unload", node=node)
        for place in answer["nodes"]:
            typer.echo(f"{name} is off {place['node']}" + ("" if place["unloaded"] else " (it was already)"))
        if not answer["nodes"]:
            typer.echo(f"{name} is on no node")


@app.command()
def pin(
    name: Annotated[str, typer.Argument(help="The model.")],
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="So many stand ready at all times.")] = 1,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Keep a model on devices: it never leaves for another. Holds over `apply`, until `unpin`."""
    with refusals_told():
        open_api(admin_url, admin_key).post(f"/models/{part(name)}/pin", min_replicas=replicas)
        typer.echo(f"{name} is pinned, with {replicas} {'replica' if replicas == 1 else 'replicas'} at least")


@app.command()
def unpin(
    name: Annotated[str, typer.Argument(help="The model.")],
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Let a model that was pinned by hand leave again when another is worth more."""
    with refusals_told():
        open_api(admin_url, admin_key).post(f"/models/{part(name)}/unpin")
        typer.echo(f"{name} is not pinned")


@app.command()
def forecast(
    name: Annotated[str, typer.Argument(help="The model.")],
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Say when a model is expected to be wanted, what its place in memory is worth, and how many replicas it wants."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get(f"/models/{part(name)}/forecast")
        if output is not Format.TABLE:
            show_data(found, output)
            return
        typer.echo(f"{name} (pool {found['pool']})")
        for line in _forecast_lines(found):
            typer.echo(f"  {line}")


def _forecast_lines(found: dict[str, Any]) -> Iterator[str]:
    rate = f"{found['requests_per_s']:.3g} requests/s of late, {found['queue_ms_mean']:.0f} ms in the queue"
    yield f"traffic    {rate} (promise: {found['promise_ms']} ms)"
    reason = f": {found['replicas_reason']}" if found["replicas_reason"] else ""
    yield f"replicas   {found['replicas']} ready, {found['replicas_wanted']} wanted{reason}"
    if not found["wanted_before"]:
        yield "forecast   none: it has not been asked for yet"
        return
    yield f"forecast   {found['text']}"
    losses = sorted(found["loss_by_predictor"].items(), key=lambda each: each[1])
    yield "back-test  " + ", ".join(f"{name} {loss:.2f}" for name, loss in losses) + " (nats a gap; less is better)"
    value = f"{found['value_per_mib_s']:.3g} ms of waiting saved per MiB and second; a load takes {found['load_ms']} ms"
    yield f"worth      {value}"
    warm, least = found["warm_arrivals_per_minute"], found["prewarm_least_per_minute"]
    verdict = "would be loaded ahead of a request" if warm >= least else "would not be loaded ahead of a request"
    yield f"pre-warm   {warm:.3g} arrivals served warm a minute; {verdict} (from {least:g} on, if memory allows)"


def _pinned(model: dict[str, Any], pins: dict[str, Any]) -> str:
    """Whether it stays on devices, who says so, and how many replicas at least."""
    pin = pins.get(model["name"])
    least = max(model["min_replicas"], pin["min_replicas"] if pin else 0, 1 if model["pinned"] else 0)
    if not least:
        return ""
    return f"{least} ({'by hand' if pin else 'declared'})"


def _rows(model: dict[str, Any], pins: dict[str, Any], nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    known = {
        "name": model["name"],
        "engine": model["engine"],
        "digest": model["digest"],
        "pool": model["pool"],
        "pinned": _pinned(model, pins),
    }
    found = False
    for node in nodes:
        for instance in node["instances"]:
            if instance["model"] == model["name"]:
                found = True
                old = "" if instance["digest"] == model["digest"] else "an older version; "
                yield {
                    **known,
                    "node": node["node_id"],
                    "state": instance["state"],
                    "device_bytes": instance["device_bytes"],
                    "load_ms": instance["load_ms"],
                    "reason": old + instance["reason"],
                }
    if not found:
        yield {
            **known,
            "node": "",
            "state": "registered",
            "device_bytes": model["device_bytes"],
            "load_ms": "",
            "reason": "",
        }
