"""Commands on nodes: what reaches the ssh client, and what comes back."""

import os
import socket
import stat
from pathlib import Path

import pytest

from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Node, Ssh
from ddp_slurm.ssh.command import RemoteError, is_local, ssh_argv
from ddp_slurm.ssh.run import on_all, run, run_script

AWAY = Node(
    "alpha", address="192.0.2.77", ssh=Ssh(user="ops", port=2222, identity="~/keys/id 100%")
)

STUB_SSH = """#!/bin/sh
printf '%s\\n' "$@" >"$STUB_LOG"
while [ "$1" != -- ]; do shift; done
exec sh -c "$3"
"""


@pytest.fixture
def stub_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that runs the command here, through a shell as sshd does.

    Its arguments are in the file returned.
    """
    client = tmp_path / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(STUB_SSH)
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "arguments"
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_LOG", str(log))
    return log


def test_ssh_argv_has_the_settings_of_cluster_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    argv = ssh_argv(AWAY, "true")
    assert argv[-3:] == ["--", "192.0.2.77", "true"]
    assert argv[argv.index("-l") + 1] == "ops"
    assert argv[argv.index("-p") + 1] == "2222"
    assert argv[argv.index("-i") + 1] == "/home/me/keys/id 100%%"
    assert {"BatchMode=yes", "ControlMaster=no", "ControlPath=none", "IdentitiesOnly=yes"} <= set(
        argv
    )


def test_ssh_argv_leaves_the_rest_to_the_users_configuration() -> None:
    argv = ssh_argv(Node("alpha"), "true")
    assert not {"-l", "-p", "-i", "IdentitiesOnly=yes"} & set(argv)
    assert argv[-2] == "alpha"


@pytest.mark.parametrize(
    "word",
    ["a b", "it's", "$HOME", "`id`", "a;b", "*", "", "-n", 'say "x"', "back\\slash", "!x", "ü"],
)
def test_run_passes_each_word_unchanged(stub_ssh: Path, word: str) -> None:
    assert run(AWAY, ["printf", "%s.", word, "end"]).out == f"{word}.end."


def test_run_refuses_control_characters(stub_ssh: Path) -> None:
    with pytest.raises(RemoteError, match="control character"):
        run(AWAY, ["printf", "a\nreboot"])
    assert not stub_ssh.exists()


def test_run_script_puts_no_secret_into_an_argument(stub_ssh: Path) -> None:
    script = """word='s3cret'
read line || line=nothing
printf '%s %s\\n' "$word" "$line"
cat
echo end"""
    assert run_script(AWAY, script) == Answer(0, "s3cret nothing\nend\n", "")
    assert "s3cret" not in stub_ssh.read_text()


@pytest.mark.parametrize(("uid", "through_sudo"), [("0", False), ("1000", True)])
def test_run_script_uses_sudo_only_for_other_users(
    stub_ssh: Path, monkeypatch: pytest.MonkeyPatch, uid: str, through_sudo: bool
) -> None:
    for name, body in (("id", f"echo {uid}"), ("sudo", 'echo "sudo $*"; shift 2; exec "$@"')):
        tool = stub_ssh.parent / "bin" / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(stat.S_IRWXU)
    done = run_script(AWAY, "echo 'a  b'", as_root=True, wrapper=("env", "X=1 2"))
    assert done.out == ("sudo -n -- env X=1 2 sh -s\n" if through_sudo else "") + "a  b\n"


def test_run_distinguishes_command_and_connection(stub_ssh: Path) -> None:
    assert run(AWAY, ["sh", "-c", "echo no >&2; exit 3"]) == Answer(3, "", "no\n")
    with pytest.raises(
        RemoteError,
        match=r"alpha: cannot be reached by ssh \(ops@192\.0\.2\.77 port 2222\): .*ssh-copy-id",
    ):
        run(AWAY, ["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"])
    with pytest.raises(RemoteError, match=r"alpha: sleep did not end within 0\.1 s"):
        run(AWAY, ["sleep", "5"], timeout_seconds=0.1)


def test_run_needs_no_ssh_on_this_machine(stub_ssh: Path) -> None:
    for node in (
        Node(socket.gethostname()),
        Node("x", address="127.0.0.1"),
        Node("x", address="::1"),
    ):
        assert run(node, ["printf", "%s", "a b"]).out == "a b"
    assert run(Node("x", address="127.0.0.1"), ["no-such-command"]).status == 127
    assert not stub_ssh.exists()


def test_is_local_is_false_for_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody_else")  # what a plain su leaves
    assert not is_local(Node("x", address="127.0.0.1", ssh=Ssh(user="somebody_else")))
    assert not is_local(Node("elsewhere"))
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a bare uid, as in some containers
    assert not is_local(Node("x", address="127.0.0.1", ssh=Ssh(user="somebody_else")))
    assert not is_local(Node("x", address="192.0.2.77"))


def test_on_all_returns_the_error_of_one_node() -> None:
    def ask(node: Node) -> str:
        if node.name == "b":
            raise RemoteError("b: cannot be reached")
        return node.name.upper()

    answers = on_all([Node("a"), Node("b"), Node("c")], ask)
    assert (answers["a"], answers["c"]) == ("A", "C")
    assert isinstance(answers["b"], RemoteError)
