"""`python -m services.loader`: the loader of one node, configured by the environment. `--help` lists the settings."""

from roundhouse.environment import settings_of_process
from roundhouse.lifecycle import run
from services.loader.app import application
from services.loader.settings import LoaderSettings

DESCRIPTION = "Weights of one node in every tier, its memory ledger, and Triton's model control."


def main() -> None:
    """Run until SIGTERM or SIGINT. Exit codes: `lifecycle.run`."""
    settings = settings_of_process(LoaderSettings, "loader", DESCRIPTION)
    run("loader", settings, application(settings))


if __name__ == "__main__":
    main()
