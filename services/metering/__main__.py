"""`python -m services.metering`: one metering process, configured by the environment. `--help` lists the settings."""

from roundhouse.environment import settings_of_process
from roundhouse.lifecycle import run
from services.metering.app import application
from services.metering.settings import MeteringSettings

DESCRIPTION = "Records usage events in the ledger, publishes the billing stream, answers usage queries."


def main() -> None:
    """Run until SIGTERM or SIGINT. Exit codes: `lifecycle.run`."""
    settings = settings_of_process(MeteringSettings, "metering", DESCRIPTION)
    run("metering", settings, application(settings))


if __name__ == "__main__":
    main()
