"""`roundhouse adapters`: what is declared over which base, and which of it nodes have refused, and why."""

from typing import Annotated, Any

import typer

from roundhouse.cli.admin_client import AdminKey, AdminUrl, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_rows

COLUMNS = ("name", "base", "tenant", "digest", "refused")
DIGEST_SHOWN = len("sha256:") + 12  # as in the names of Triton models

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="See adapters.")


@app.callback()
def _adapters() -> None:
    """See adapters."""


@app.command(name="list")
def list_adapters(
    base: Annotated[str, typer.Option("--base", help="Only those over this model.")] = "",
    refused: Annotated[bool, typer.Option("--refused", help="Only those that a node has refused.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """List adapters, and why nodes refused them; below, how many each node has."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        declared = api.get("/catalogue", kind="adapters")["adapters"]
        nodes = api.get("/nodes")["nodes"]
        reasons = _reasons(nodes)
        rows = [
            {"name": item["name"], "base": item["base"], "tenant": item["tenant"], "digest": item["digest"]}
            | {"refused": reasons.get(item["name"], "")}
            for item in declared
            if base in ("", item["base"]) and (item["name"] in reasons or not refused)
        ]
        if output is not Format.TABLE:
            show_rows(rows, COLUMNS, output)
            return
        show_rows([{**row, "digest": row["digest"][:DIGEST_SHOWN]} for row in rows], COLUMNS, output)
        for node in nodes:
            has = node["adapters"]
            typer.echo(f"{node['node_id']}: {has['on_disk']} on disk, {has['in_host']} in host memory")


def _reasons(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Adapter → the nodes that refused it, and why."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        for each in node["adapters"]["refused"]:
            found.setdefault(each["adapter"], []).append(f"{node['node_id']}: {each['reason']}")
    return {name: "; ".join(texts) for name, texts in found.items()}
