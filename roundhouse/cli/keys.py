"""`roundhouse keys`: make, list, rotate and revoke keys. A key is printed once, when it is made, on stdout alone."""

import re
from typing import Annotated

import typer

from roundhouse.cli.admin_client import AdminKey, AdminUrl, Refused, open_api, part
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_rows, tell

COLUMNS = ("key_id", "tenant", "scopes", "state", "created", "expires", "label")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BUDGET = re.compile(r"(\d{1,10}(?:\.\d{1,12})?) ?([A-Z]{3})?(?:/(day|month))?")
_DURATION = re.compile(r"(\d{1,9})([smhd])")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Make, list, rotate and revoke keys."
)


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whose key; left out for an admin key.")] = "",
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="inference, usage:read or admin; may be repeated.")
    ] = None,
    expires: Annotated[str, typer.Option("--expires", help="How long it works, such as 90d or 12h.")] = "",
    label: Annotated[str, typer.Option("--label", help="A note for whoever lists keys.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(help="Limit of this key beside its tenant's.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Limit of this key beside its tenant's.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help="Limit of this key beside its tenant's.")] = None,
    queued_requests: Annotated[int | None, typer.Option(help="Limit of this key beside its tenant's.")] = None,
    queued_tokens: Annotated[int | None, typer.Option(help="Limit of this key beside its tenant's.")] = None,
    budget: Annotated[str, typer.Option(help="What may be spent with it: 25, 25EUR, 0.5USD/day.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Make a key and print it. It cannot be shown again."""
    wish: dict[str, object] = {
        "tenant": tenant,
        "scopes": scope or ["inference"],
        "expires_in_s": _seconds(expires, "--expires"),
        "label": label,
    }
    limits: dict[str, object] = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "queued_requests": queued_requests,
        "queued_tokens": queued_tokens,
        "budget": _budget(budget),
    }
    if any(value is not None for value in limits.values()):
        wish["limits"] = limits
    with refusals_told():
        made = open_api(admin_url, admin_key).post("/keys", **wish)
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
        show_rows(found, COLUMNS, output)


@app.command()
def rotate(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")],
    overlap: Annotated[str, typer.Option("--overlap", help="How long the old key still works.")] = "24h",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Make a key's successor and print it; the old key ends after the overlap."""
    seconds = _seconds(overlap, "--overlap")
    with refusals_told():
        _check_id(key_id)
        made = open_api(admin_url, admin_key).post(f"/keys/{part(key_id)}/rotate", overlap_s=seconds or 0)
        if output is not Format.TABLE:
            show_data(made, output)
            return
        typer.echo(made["key"])
        tell(f"{made['key_id']} of {made['tenant']} follows {key_id}, which ends {made['old']['expires']}")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")],
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """End a key at once, everywhere. Revoking it again changes nothing."""
    with refusals_told():
        _check_id(key_id)
        ended = open_api(admin_url, admin_key).delete(f"/keys/{part(key_id)}")
        typer.echo(f"{ended['key_id']} of {ended['tenant']} is revoked")


def _budget(text: str) -> dict[str, str] | None:
    if not text:
        return None
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise typer.BadParameter("must be an amount such as 25, 25EUR or 0.5USD/day", param_hint="--budget")
    return {"amount": match[1], "currency": match[2] or "USD", "period": match[3] or "month"}


def _check_id(key_id: str) -> None:
    if key_id.startswith("rh-"):
        raise Refused("this takes the key's id (`roundhouse keys list`), not the key itself")


def _seconds(text: str, option: str) -> int | None:
    if not text:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise typer.BadParameter("must be a number and s, m, h or d, such as 90d", param_hint=option)
    return int(match[1]) * _SECONDS[match[2]]
