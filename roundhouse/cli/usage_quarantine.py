"""`roundhouse usage quarantine`: events that metering could not record, and another try at them."""

from typing import Annotated

import typer

from roundhouse.cli.admin_client import AdminKey, AdminUrl, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_rows

COLUMNS = ("first_seen", "fingerprint", "subject", "bytes", "reason")
TOLD = {"quarantined": "still quarantined"}  # results whose own name would sound like news

commands = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Events that could not be recorded, and another try at them.",
)


@commands.command(name="list")
def list_events(
    limit: Annotated[int, typer.Option("--limit", min=1, help="Oldest first, at most this many.")] = 100,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """List events that could not be recorded, and why. Reasons name fields and numbers, not contents."""
    with refusals_told():
        events = open_api(admin_url, admin_key).get("/metering/quarantine", limit=str(limit))["events"]
        show_rows(events, COLUMNS, output)


@commands.command()
def replay(output: Output = Format.TABLE, admin_url: AdminUrl = "", admin_key: AdminKey = "") -> None:
    """Record what can be recorded now: after a price, a program or an emitter was corrected. May be repeated."""
    with refusals_told():
        results = open_api(admin_url, admin_key).post("/metering/quarantine/replay")["results"]
        if output is not Format.TABLE:
            show_data(results, output)
        else:
            counts = (f"{count} {TOLD.get(result, result)}" for result, count in results.items())
            typer.echo(", ".join(counts) or "the quarantine is empty")
