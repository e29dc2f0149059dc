"""The cluster's folder: one owner at a time, complete files only, layouts that are not ours are left alone."""

import stat
from pathlib import Path

import pytest

from deploy.local.home import AlreadyRunning, ClusterProblem, ClusterState, Home, PartState, Secrets, replace_file
from deploy.local.leftovers import remove_leftovers


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A prepared folder."""
    home = Home(tmp_path / "home")
    home.prepare()
    return home


def state_of(home: Home, *parts: PartState) -> ClusterState:
    """A state as a running cluster writes it."""
    return ClusterState(
        pid=1, start_ticks=1, started_unix_ms=0, http_port=18080, grpc_port=1, admin_port=2, parts=list(parts)
    )


def test_a_second_owner_is_told_the_address_of_the_first(home: Home) -> None:
    """Running twice names where the running cluster answers."""
    home.write_state(state_of(home))
    with (
        home.locked(),
        pytest.raises(AlreadyRunning, match=r"already running at http://127\.0\.0\.1:18080"),
        home.locked(),
    ):
        pass
    assert not home.is_locked()


def test_a_folder_of_another_layout_is_left_alone(home: Home) -> None:
    """The message says which layouts differ and which option helps; nothing is changed."""
    (home.root / "layout").write_text("0\n")
    with pytest.raises(ClusterProblem, match=r"layout '0'.*--data-dir"):
        home.prepare()
    assert (home.root / "layout").read_text() == "0\n"


def test_data_without_a_layout_file_is_not_taken_for_ours(tmp_path: Path) -> None:
    """A folder that happens to hold `data` is not written into."""
    (tmp_path / "data").mkdir()
    with pytest.raises(ClusterProblem, match="unknown"):
        Home(tmp_path).prepare()


def test_a_path_that_is_a_file_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    """The path is named."""
    (tmp_path / "home").write_text("")
    with pytest.raises(ClusterProblem, match="cannot use the folder"):
        Home(tmp_path / "home").prepare()


def test_keys_are_readable_by_their_owner_only(home: Home) -> None:
    """Secrets survive, with mode 0600."""
    home.write_secrets(Secrets(admin_key="rh-a", tenant_keys={"acme": "rh-b"}))
    assert home.read_secrets() == Secrets(admin_key="rh-a", tenant_keys={"acme": "rh-b"})
    assert stat.S_IMODE(home.secrets_file.stat().st_mode) == 0o600


def test_broken_keys_are_a_problem_that_says_what_to_do(home: Home) -> None:
    """A half-written file of another program is not silently replaced."""
    home.secrets_file.write_text("{")
    with pytest.raises(ClusterProblem, match="remove it to make new keys"):
        home.read_secrets()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """A reader that opened the old file keeps reading it, and no partial file stays."""
    path = tmp_path / "file"
    replace_file(path, b"old")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_a_dead_cluster_are_removed_and_named(home: Home) -> None:
    """Dead pids, an unreadable state, shared memory and half-written folders do not stop the next start."""
    segment = Path("/dev/shm") / f"{home.shared_memory_prefix}arena-node-1"  # noqa: S108
    segment.write_bytes(b"x")
    (home.data / "models.partial").mkdir()
    home.state_file.write_text('{"pid": 1')
    done = remove_leftovers(home)
    assert [line for line in done if "state.json" in line]
    assert [line for line in done if "1 shared-memory" in line]
    assert [line for line in done if "models.partial" in line]
    assert not segment.exists()
    assert not home.state_file.exists()
    assert remove_leftovers(home) == [], "idempotent"


def test_a_recorded_pid_that_is_another_process_now_is_not_touched(home: Home) -> None:
    """Pids are used again: pid 1 with another start time is not ours, and is neither named nor ended."""
    home.write_state(state_of(home, PartState(name="gateway", pid=1, start_ticks=1, port=1)))
    assert remove_leftovers(home) == []
