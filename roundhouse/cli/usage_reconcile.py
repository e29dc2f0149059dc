"""`roundhouse usage reconcile`: what admissions, settlements, events, ledger and billing stream disagree on."""

from typing import Annotated

import typer

from roundhouse.cli.admin_client import AdminKey, AdminUrl, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_table, tell

EXIT_DIFFERENT = 1
COLUMNS = ("kind", "request_id", "tenant", "detail")


def add_to(app: typer.Typer) -> None:
    """Make this a subcommand of `roundhouse usage`."""
    app.command(name="reconcile")(reconcile)


def reconcile(
    since: Annotated[str, typer.Option("--since", help="From this time on; default an hour before the end.")] = "",
    until: Annotated[str, typer.Option("--until", help="Before this time; default now.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Compare the books of a window, at most a day. Exit code 1 if they differ."""
    with refusals_told():
        wanted = {name: text for name, text in (("from", since), ("to", until)) if text}
        found = open_api(admin_url, admin_key).get("/metering/differences", **wanted)
        if as_json or output is not Format.TABLE:
            show_data(found, Format.JSON if as_json else output)
        else:
            if found["differences"]:
                show_table(COLUMNS, [[each[column] for column in COLUMNS] for each in found["differences"]])
            checked = ", ".join(f"{count} {what}" for what, count in sorted(found["checked"].items())) or "nothing"
            tell(f"{found['from']} to {found['to']}: {checked}; {len(found['differences'])} differences")
        if found["differences"]:
            raise typer.Exit(EXIT_DIFFERENT)
