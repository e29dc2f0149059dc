"""`python -m services.metering`: run the service, or look after its quarantine. `--help` lists the settings."""

import argparse
import asyncio
import sys

from roundhouse import lifecycle
from roundhouse.environment import read_settings
from roundhouse.errors import RoundhouseError
from services.metering.app import application
from services.metering.settings import MeteringSettings
from services.metering.upkeep import list_quarantine, replay


def main() -> None:
    """Parse the command line and run. Exit 2: bad arguments or settings; 3: cannot start."""
    options = _parser().parse_args()
    settings = read_settings(MeteringSettings)
    if options.command is None:
        lifecycle.run("metering", settings, application(settings))
        return
    work = list_quarantine(settings, options.limit) if options.action == "list" else replay(settings, options.limit)
    try:
        sys.stdout.write(asyncio.run(work))
    except RoundhouseError as error:
        sys.stderr.write(f"metering: {error.message}\n")
        sys.exit(lifecycle.EXIT_CANNOT_START)


def _parser() -> argparse.ArgumentParser:
    fields = MeteringSettings.model_fields.items()
    lines = [
        f"  ROUNDHOUSE_{name.upper():16} {field.description or name} [{field.get_default()}]" for name, field in fields
    ]
    parser = argparse.ArgumentParser(
        prog="python -m services.metering",
        description="Records usage events in the ledger, publishes the billing stream, answers usage queries.",
        epilog="environment:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="quarantine")
    quarantine = commands.add_parser("quarantine", help="events that could not be recorded")
    quarantine.add_argument("action", choices=("list", "replay"), help="show them, or record what can be recorded now")
    quarantine.add_argument("--limit", type=int, default=100, help="oldest first, at most this many (default 100)")
    return parser


if __name__ == "__main__":
    main()
