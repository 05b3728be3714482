"""Only processes that know the job's token meet; what others send changes nothing."""

import resource
import socket
import time
from pathlib import Path

import pytest

from ddp_slurm.job_env import JobEnv, JobEnvError, new_token
from ddp_slurm.training.process_group.peers import Ending
from ddp_slurm.training.process_group.port import listen
from ddp_slurm.training.process_group.sealed import ClientSide, NotOurs, Secret, pack
from ddp_slurm.training.process_group.store_server import StoreServer

from .joining import join, meet_and_leave_when_told, meet_in_nccls_store
from .strangers import (
    as_a_stranger,
    be_or_meet_an_impostor,
    connect_often,
    report_of_success,
    set_keys,
    start_when_told,
)
from .worlds import NO_TOKEN, free_port, run_world, tell, world

TOKEN = "0123456789abcdef" * 2
NODE = {"SLURMD_NODENAME": "node"}


def test_stranger_cannot_end_the_ranks(tmp_path: Path) -> None:
    port = free_port()
    variables = {"MASTER_PORT": str(port)}
    with world(tmp_path, (2,), meet_and_leave_when_told, environ=variables) as running:
        assert [running.receive(rank) for rank in (0, 1)] == ["met", "met"]
        as_a_stranger(set_keys, port, report_of_success(2))
        for rank in (0, 1):
            tell(running.pipes[rank], "go")
        assert running.results() == ["left", "left"]


def test_ranks_never_end_well_because_of_a_report(tmp_path: Path) -> None:
    port = free_port()
    variables = {"MASTER_PORT": str(port), **NO_TOKEN}
    with world(tmp_path, (2,), meet_and_leave_when_told, environ=variables) as running:
        assert [running.receive(rank) for rank in (0, 1)] == ["met", "met"]
        as_a_stranger(set_keys, port, report_of_success(2))
        assert running.wait(30) == [1, 1]


@pytest.mark.parametrize("value", ["", "[]", "null", '["end"]', "\x00", '{"a": 1}', '["x", 2, 3]'])
def test_message_that_no_rank_wrote_names_its_key(tmp_path: Path, value: str) -> None:
    port = free_port()
    variables = {"MASTER_PORT": str(port), **NO_TOKEN}
    with world(tmp_path, (2,), meet_and_leave_when_told, environ=variables) as running:
        assert [running.receive(rank) for rank in (0, 1)] == ["met", "met"]
        as_a_stranger(set_keys, port, {"message/1/1": value})
        running.processes[1].join(30)
        assert running.processes[1].exitcode == (2 if value.startswith('["x"') else 1)
        log = running.log(1)
        assert "Traceback" not in log
        assert "'message/1/1'" in log or value.startswith('["x"')


@pytest.mark.parametrize(
    ("status", "expected"), [(0, 1), (3, 3), (256, 1), (-1, 1), ("0", 1), (None, 1), (2.0, 1)]
)
def test_report_of_a_failure_carries_a_failure(status: object, expected: int) -> None:
    assert Ending.reported(status, "why") == (expected, "why")


@pytest.mark.parametrize("has_token", [True, False])
def test_object_of_an_impostor_is_not_run(tmp_path: Path, has_token: bool) -> None:
    file = tmp_path / "has run"

    def stranger_is_first(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, **NO_TOKEN} if rank == 0 or not has_token else variables

    found = run_world(
        tmp_path / "world", (2,), be_or_meet_an_impostor, str(file), change=stranger_is_first
    )
    assert not file.exists()
    assert "no answer from rank 0" in found[1] or not has_token


@pytest.mark.parametrize(("variables", "kind"), [({}, "TCPStore"), (NO_TOKEN, "PrefixStore")])
def test_nccl_gets_torchs_own_store(tmp_path: Path, variables: dict[str, str], kind: str) -> None:
    found = run_world(tmp_path, (3,), meet_in_nccls_store, environ=variables)
    assert found == [[kind] * 3] * 3


@pytest.mark.parametrize("other", ["", "f" * 32])
def test_rank_with_another_token_is_missed(tmp_path: Path, other: str) -> None:
    def change(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "DDP_SLURM_TOKEN": other} if rank == 1 else variables

    found = run_world(tmp_path, (2,), join, 2.0, change=change)
    assert "expected 2 ranks within 2 s, found 1" in found[0]
    assert "no answer from rank 0" in found[1]
    assert "DDP_SLURM_TOKEN?" in found[1] or "no DDP_SLURM_TOKEN" in found[1]


def test_token_must_be_one_that_nobody_guesses() -> None:
    assert JobEnv.from_environ({"DDP_SLURM_TOKEN": new_token()}).token
    for token in ("5678", "guess me", "F" * 32):
        with pytest.raises(JobEnvError) as caught:
            JobEnv.from_environ({"DDP_SLURM_TOKEN": token})
        assert token not in str(caught.value)
    assert new_token() not in repr(JobEnv(token=new_token()))


def test_ranks_learn_the_port_of_a_job_whose_own_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {"MASTER_PORT": str(silent.getsockname()[1]), **NODE}
        assert run_world(tmp_path, (3,), join, environ=variables) == ["met"] * 3
        note = (tmp_path / "rank0.log").read_text()
    assert f"note: rank 0 on node: port {variables['MASTER_PORT']} is taken" in note


def test_store_listens_at_the_address_of_rank_0_alone() -> None:
    port = free_port()
    listeners = listen("127.0.0.1", port)
    addresses = [listener.getsockname()[0] for listener in listeners]
    for listener in listeners:
        listener.close()
    assert addresses == ["127.0.0.1"]


def test_store_listens_everywhere_for_a_name_of_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ubuntu's /etc/hosts has the own name at 127.0.1.1, where no other host reaches it."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", free_port()))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    [listener] = listen("alpha", found[0][4][1])
    with listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


STRAYS = 3000


def test_stray_connections_change_nothing(tmp_path: Path) -> None:
    """While the ranks meet and while they train: at most one line a minute in the log."""
    port = free_port()
    variables = {"MASTER_PORT": str(port), **NODE}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most > STRAYS
    started = time.monotonic()
    with world(tmp_path, (2,), start_when_told, environ=variables) as running:
        token_store_is_open(port)
        as_a_stranger(connect_often, port, STRAYS // 2)
        tell(running.pipes[1], "come")
        assert [running.receive(rank) for rank in (0, 1)] == ["met", "met"]
        as_a_stranger(connect_often, port, STRAYS // 2)
        tell(running.pipes[0], "stop")
        steps = running.results()
        logs = [running.log(rank) for rank in (0, 1)]
    minutes = int((time.monotonic() - started) / 60)
    assert steps[0] == steps[1] > 1
    assert logs[1] == ""
    lines = logs[0].splitlines()
    assert len(lines) <= 1 + minutes, logs[0]
    assert all("note: rank 0 on node turned away" in line for line in lines)


def token_store_is_open(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


class Store:
    """A server in this process, and connections to it."""

    def __init__(self, world_name: str = "job 1") -> None:
        self.secret = Secret(TOKEN, world_name)
        self.lines: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        StoreServer([listener], self.secret, self.lines.append).start()

    def client(self, secret: Secret | None = None) -> ClientSide:
        one = socket.create_connection(("127.0.0.1", self.port), 5)
        return ClientSide(one, secret or self.secret, 5.0)


@pytest.mark.parametrize("other", [Secret("f" * 32, "job 1"), Secret(TOKEN, "job 2")])
def test_greeting_with_another_secret_fails_on_both_ends(other: Secret) -> None:
    store = Store()
    with pytest.raises(NotOurs):
        store.client(other)
    assert store.client().ask(b"count") == [b"ok", b"0"]


@pytest.mark.parametrize(("change", "most"), [("flip", 0), ("repeat", 1)])
def test_changed_and_repeated_messages_are_refused(change: str, most: int) -> None:
    store = Store()
    client = store.client()
    message = client._sent.message(pack([b"add", b"key", b"1"]))
    if change == "flip":
        message = message[:-1] + b"2"
    client._socket.settimeout(5)
    client._socket.sendall(message if change == "flip" else 2 * message)
    while client._socket.recv(1000):
        pass
    assert int(store.client().ask(b"add", b"key", b"0")[1]) <= most


def test_silent_connections_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_slurm.training.process_group.store_server.GREETING_SECONDS", 0.5)
    store = Store()
    with socket.create_connection(("127.0.0.1", store.port), 5) as silent:
        assert silent.recv(1) == b""
    deadline = time.monotonic() + 5
    while not store.lines and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.lines == [
        "turned away 1 connection without the job's token, the last from 127.0.0.1"
    ]
