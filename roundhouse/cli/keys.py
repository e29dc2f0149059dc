"""`roundhouse keys`: make, list and revoke keys. A key is printed once, when it is made, on stdout alone."""

import re
from typing import Annotated

import typer

from roundhouse.cli.admin_client import AdminKey, AdminUrl, Refused, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table, tell

COLUMNS = ("key_id", "tenant", "scopes", "state", "created", "expires", "label")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Make, list and revoke keys.")


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whose key; left out for an admin key.")] = "",
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="inference, usage:read or admin; may be repeated.")
    ] = None,
    expires: Annotated[str, typer.Option("--expires", help="How long it works, such as 90d or 12h.")] = "",
    label: Annotated[str, typer.Option("--label", help="A note for whoever lists keys.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Make a key and print it. It cannot be shown again."""
    seconds = _seconds(expires)
    with refusals_told():
        api = open_api(admin_url, admin_key)
        made = api.post("/keys", tenant=tenant, scopes=scope or ["inference"], expires_in_s=seconds, label=label)
        if output is not Format.TABLE:
            show_data(made, output)
            return
        typer.echo(made["key"])
        tell(f"{made['key_id']} of {made['tenant']}: keep the key now, it cannot be shown again")


@app.command(name="list")
def list_keys(
    tenant: Annotated[str, typer.Argument(help="Only keys of this tenant.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """List keys, ended ones too. No key can be seen again."""
    with refusals_told():
        found = open_api(admin_url, admin_key).get("/keys", **({"tenant": tenant} if tenant else {}))["keys"]
        if output is not Format.TABLE:
            show_data(found, output)
            return
        show_table(COLUMNS, [[key[column] for column in COLUMNS] for key in found])


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")],
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """End a key at once, everywhere. Revoking it again changes nothing."""
    with refusals_told():
        if key_id.startswith("rh-"):
            raise Refused("this takes the key's id (`roundhouse keys list`), not the key itself")
        ended = open_api(admin_url, admin_key).delete(f"/keys/{part(key_id)}")
        typer.echo(f"{ended['key_id']} of {ended['tenant']} is revoked")


def _seconds(text: str) -> int | None:
    if not text:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter("must be a number and s, m, h or d, such as 90d", param_hint="--expires")
    return int(match[1]) * _SECONDS[match[2]]
