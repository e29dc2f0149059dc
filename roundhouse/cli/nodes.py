"""`roundhouse nodes`: what the nodes hold, and taking one out of service for maintenance."""

import time
from typing import Annotated, Any

import typer

from roundhouse.cli.admin_client import AdminApi, AdminKey, AdminUrl, Refused, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table

COLUMNS = ("node", "pool", "role", "accepting", "reason", "instances", "device", "host", "disk")
LOOK_S = 0.5

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="See nodes, take them out of service."
)

Name = Annotated[str, typer.Argument(help="The node.")]


@app.command(name="list")
def list_nodes(output: Output = Format.TABLE, admin_url: AdminUrl = "", admin_key: AdminKey = "") -> None:
    """List nodes with what they hold in each tier."""
    with refusals_told():
        nodes = open_api(admin_url, admin_key).get("/nodes")["nodes"]
        if output is not Format.TABLE:
            show_data(nodes, output)
            return
        show_table(COLUMNS, [_row(node) for node in nodes])


@app.command()
def drain(
    name: Name,
    reason: Annotated[str, typer.Option("--reason", help="Shown to whoever asks why.")] = "maintenance",
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until it is empty; 0: do not.")] = 300.0,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Take a node out of service: no new work, what runs ends, then nothing stands on it. Outlives restarts."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        api.post(f"/nodes/{part(name)}/drain", reason=reason)
        typer.echo(f"{name} takes no new work")
        if wait_s > 0:
            _wait_until_empty(api, name, wait_s)
            typer.echo(f"{name} is empty; `roundhouse nodes resume {name}` brings it back")


@app.command()
def resume(name: Name, admin_url: AdminUrl = "", admin_key: AdminKey = "") -> None:
    """Let a node take work again."""
    with refusals_told():
        open_api(admin_url, admin_key).post(f"/nodes/{part(name)}/resume")
        typer.echo(f"{name} takes work again")


def _wait_until_empty(api: AdminApi, name: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        standing = standing_on(api.get("/nodes")["nodes"], name)
        if not standing:
            return
        if time.monotonic() > deadline:
            raise Refused(f"{name} still has {', '.join(standing)} after {wait_s:g} s; it goes on draining")
        time.sleep(LOOK_S)


def standing_on(nodes: list[dict[str, Any]], name: str) -> list[str]:
    """Models that are on a node's device or on their way, with their states."""
    at_rest = ("staged", "failed", "registered")
    return [
        f"{instance['model']} ({instance['state']})"
        for node in nodes
        if node["node_id"] == name
        for instance in node["instances"]
        if instance["state"] not in at_rest
    ]


def _row(node: dict[str, Any]) -> list[object]:
    used = {tier["tier"]: f"{tier['resident'] + tier['reserved']:,} of {tier['capacity']:,}" for tier in node["tiers"]}
    return [
        node["node_id"],
        node["pool"],
        node["role"],
        "yes" if node["accepting"] else "no",
        node["unhealthy_reason"],
        len(standing_on([node], node["node_id"])),
        *(used.get(tier, "") for tier in ("device", "host", "disk")),
    ]
