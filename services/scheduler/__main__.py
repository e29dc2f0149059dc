"""`python -m services.scheduler`: one scheduler replica, configured by the environment."""

import argparse

from roundhouse.environment import read_settings
from roundhouse.lifecycle import run
from services.scheduler.app import application
from services.scheduler.settings import SchedulerSettings


def _help() -> str:
    lines = ["environment variables:"]
    for name, field in SchedulerSettings.model_fields.items():
        default = "generated" if field.default_factory else f"default {field.default!r}"
        lines.append(f"  ROUNDHOUSE_{name.upper():<22} {field.description or ''} ({default})")
    return "\n".join(lines)


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    argparse.ArgumentParser(
        prog="python -m services.scheduler",
        description="Fair queues and placement: who runs next, and which model stands where.",
        epilog=_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    settings = read_settings(SchedulerSettings)
    run("scheduler", settings, application(settings))


if __name__ == "__main__":
    main()
