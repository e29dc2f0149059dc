"""`roundhouse tenants`: what operators do for one tenant."""

from typing import Annotated

import typer

from roundhouse.cli.admin_client import EXIT_REFUSED, AdminKey, AdminUrl, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table, tell

COLUMNS = ("node", "blocks", "blocks_left", "error")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Things done for one tenant.")


@app.callback()
def _root() -> None:
    """Things done for one tenant."""


@app.command(name="erase-cache")
def erase_cache(
    tenant: Annotated[str, typer.Argument(help="Whose cached blocks.")],
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Drop and overwrite every cached block of a tenant on every node, and count what is left: 0.

    Exit code 1 if a node could not do it: ask again. A node that is away does it when it is back, and tells the audit
    stream. Requests of the tenant that run meanwhile may store new blocks.
    """
    with refusals_told():
        api = open_api(admin_url, admin_key)
        declared = {each["name"] for each in api.get("/catalogue", kind="tenants")["tenants"]}
        if tenant not in declared:
            tell(f"There is no tenant `{tenant}` in the catalogue; what an earlier one of this name left is erased.")
        answer = api.post(f"/tenants/{part(tenant)}/erase-cache")
        nodes = answer["nodes"]
        if output is Format.TABLE:
            show_table(COLUMNS, [[node[column] for column in COLUMNS] for node in nodes])
            tell(f"nothing of {tenant} is left" if answer["erased"] else f"{tenant} is not erased everywhere")
        else:
            show_data(nodes, output)
    if not answer["erased"]:
        raise typer.Exit(EXIT_REFUSED)
