"""`roundhouse apply` and `roundhouse get`: put a declaration in force, and see what is."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from roundhouse.catalogue.records import Adapter, Catalogue, Model, SharingGroup, Tenant
from roundhouse.catalogue.rendering import declaration_of, entry_of
from roundhouse.cli.admin_client import EXIT_REFUSED, AdminApi, AdminKey, AdminUrl, Refused, open_api
from roundhouse.cli.admin_output import Format, Output, refusals_told, show_data, show_rows, tell

CHANGES_SHOWN = 20  # a screenful; the rest is counted


class Kind(StrEnum):
    """What there is to see."""

    TENANTS = "tenants"
    MODELS = "models"
    ADAPTERS = "adapters"
    SHARING_GROUPS = "sharing-groups"
    NODES = "nodes"


RECORDS: dict[Kind, type[Tenant | Model | Adapter | SharingGroup]] = {
    Kind.TENANTS: Tenant,
    Kind.MODELS: Model,
    Kind.ADAPTERS: Adapter,
    Kind.SHARING_GROUPS: SharingGroup,
}
COLUMNS = {
    Kind.TENANTS: ("name", "weight", "priority_class", "limits", "models"),
    Kind.MODELS: ("name", "engine", "interface", "slots", "device_bytes", "context_tokens", "pool", "access"),
    Kind.ADAPTERS: ("name", "base", "tenant", "digest"),
    Kind.SHARING_GROUPS: ("name", "tenants"),
    Kind.NODES: ("node_id", "pool", "role", "accepting", "unhealthy_reason", "device_count"),
}


def apply(
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="Declaration in YAML; - reads stdin.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and say what would change.")] = False,
    base_dir: Annotated[
        Path | None, typer.Option("--base-dir", help="What paths are relative to, as the gateways see it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="On a terminal: do not ask before anything is removed.")] = False,
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Put a declaration in force: all of it, or nothing. What is not in it is removed; on a terminal it asks first."""
    with refusals_told():
        text = _read(file)
        folder = base_dir or (Path.cwd() if str(file) == "-" else file.absolute().parent)
        api = open_api(admin_url, admin_key)
        declaration = {"text": text, "file_name": str(file), "base_dir": str(folder)}
        try:
            if not (dry_run or yes) and str(file) != "-" and sys.stdin.isatty():
                _ask_before_removing(api.post("/catalogue", **declaration, dry_run=True))
            applied = api.post("/catalogue", **declaration, dry_run=dry_run)
        except Refused as refused:
            if "problems" in refused.body:
                _show_problems(refused.body["problems"])
                raise typer.Exit(EXIT_REFUSED) from None
            raise
        if output is Format.TABLE:
            _show_applied(applied)
        else:
            show_data(applied, output)


def get(
    kind: Annotated[Kind | None, typer.Argument(help="What to show; left out: everything that is declared.")] = None,
    name: Annotated[str, typer.Argument(help="Only this one.")] = "",
    output: Output = Format.TABLE,
    admin_url: AdminUrl = "",
    admin_key: AdminKey = "",
) -> None:
    """Show what is declared, or nodes. With `-o yaml` and no KIND: a file to edit and `apply`."""
    with refusals_told():
        api = open_api(admin_url, admin_key)
        if kind is None:
            _show_everything(api, output)
            return
        if kind is Kind.NODES:
            show_rows(_nodes(api, name), COLUMNS[kind], output)
        elif output is Format.TABLE:
            show_rows(_declared(api, kind, name), COLUMNS[kind], output)
        else:
            records = (msgspec.convert(item, RECORDS[kind]) for item in _declared(api, kind, name))
            show_data([entry_of(record) for record in records], output)


def _show_everything(api: AdminApi, output: Format) -> None:
    if output is not Format.TABLE:
        show_data(declaration_of(msgspec.convert(api.get("/catalogue"), Catalogue)), output)
        return
    for number, kind in enumerate(RECORDS):
        typer.echo(("\n" if number else "") + kind.value)
        show_rows(_declared(api, kind, ""), COLUMNS[kind], output)


def _declared(api: AdminApi, kind: Kind, name: str) -> list[dict[str, Any]]:
    section = kind.value.replace("-", "_")
    found: list[dict[str, Any]] = api.get("/catalogue", kind=section, **({"name": name} if name else {}))[section]
    return found


def _nodes(api: AdminApi, name: str) -> list[dict[str, Any]]:
    nodes = [node for node in api.get("/nodes")["nodes"] if name in ("", node["node_id"])]
    if name and not nodes:
        raise Refused(f"there is no node `{name}`")
    return nodes


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Refused(f"{file} is not UTF-8 text") from error


def _ask_before_removing(planned: dict[str, Any]) -> None:
    removed = sum(change["action"] == "removed" for change in planned["changes"])
    if removed:
        _show_applied(planned)
        typer.confirm(f"Remove {removed} that the file does not have?", abort=True, err=True)


def _show_problems(problems: list[dict[str, Any]]) -> None:
    for problem in problems:
        tell(f"{problem['file']}:{problem['line']}:{problem['column']}: {problem['reason']}")
    tell(f"Nothing was applied: {len(problems)} problem{'s' if len(problems) > 1 else ''}.")


def _show_applied(applied: dict[str, Any]) -> None:
    changes = applied["changes"]
    if applied["unchanged"]:
        typer.echo(f"generation {applied['generation']}: unchanged")
        return
    for change in changes[:CHANGES_SHOWN]:
        fields = f" ({', '.join(change['fields'])})" if change["fields"] else ""
        typer.echo(f"{change['action']:8}{change['kind']:8} {change['name']}{fields}")
    if len(changes) > CHANGES_SHOWN:
        typer.echo(f"and {len(changes) - CHANGES_SHOWN} more")
    actions = [change["action"] for change in changes]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in ("added", "changed", "removed"))
    would = "would become " if applied["dry_run"] else ""
    typer.echo(f"{would}generation {applied['generation']}: {counts}")
