"""`roundhouse files`: the list of a version's files that a declaration needs when its source is an address."""

from pathlib import Path
from typing import Annotated

import typer

from roundhouse.catalogue.digests import digest_of_entries, version_entries
from roundhouse.cli.admin_client import Refused
from roundhouse.cli.admin_output import refusals_told
from roundhouse.errors import RoundhouseError


def files(
    folder: Annotated[Path, typer.Argument(help="The version's folder or file, as it lies at the address.")],
) -> None:
    """Print the files of a version with size and SHA-256, as `source.files` of a declaration takes them."""
    with refusals_told():
        try:
            entries = version_entries(folder)
        except RoundhouseError as error:
            raise Refused(error.message) from error
        typer.echo(f"# {digest_of_entries(entries)}")
        typer.echo("files:")
        for entry in entries:
            typer.echo(f"  - {{name: {entry.name}, size: {entry.size}, sha256: {entry.sha256.hex()}}}")
