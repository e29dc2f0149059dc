"""`python -m services.kvstore`: the kvstore of one node, configured by the environment. `--help` lists the settings."""

from roundhouse.environment import settings_of_process
from roundhouse.lifecycle import run
from services.kvstore.app import application
from services.kvstore.settings import KvStoreSettings

DESCRIPTION = "KV cache blocks of one node in shared memory, for the engines of that node."


def main() -> None:
    """Run until SIGTERM or SIGINT. Exit codes: `lifecycle.run`."""
    settings = settings_of_process(KvStoreSettings, "kvstore", DESCRIPTION)
    run("kvstore", settings, application(settings))


if __name__ == "__main__":
    main()
