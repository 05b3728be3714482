"""The installer's own part: what is asked, in which order, what goes where.

The steps themselves run in tests/slurm.
"""

import base64
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_slurm.admin.install import STEPS, InstallError, Outcome, first_job, install, step_script
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, GpuModel, Node, Ssh
from ddp_slurm.ssh.command import RemoteError

STEPS_FOLDER = Path(__file__).parents[2] / "cluster_setup/steps"
CLUSTER = Cluster(
    "lab",
    (
        Node(
            "gamma",
            gpus=(GpuModel(type="titan"),),
            cpus=8,
            memory_mb=30000,
            address="198.18.0.3",
            partition="small",
        ),
        Node(
            "alpha",
            gpus=(GpuModel(type="a100", count=4),),
            cpus=2,
            memory_mb=240000,
            address="198.18.0.1",
            ssh=Ssh(user="ops", port=2222, identity="~/id"),
        ),
        Node("login", cpus=4, memory_mb=8000, address="198.18.0.4"),
    ),
    controller="alpha",
)


class Nodes:
    """A runner in place of the nodes: keeps the scripts and gives the answers of ``answer``."""

    def __init__(
        self,
        versions: dict[str, str] | None = None,
        answer: Callable[[str, str], Answer] | None = None,
        cgroup: str = "",
    ) -> None:
        self.cgroup = cgroup
        self.versions = versions or {node.name: "22.05.8" for node in CLUSTER.nodes}
        self.answer = answer or (lambda step, node: Answer(0, "result ok\n", ""))
        self.ran: list[tuple[str, str]] = []
        self.scripts: dict[tuple[str, str], str] = {}
        self.arguments: list[str] = []

    def __call__(
        self,
        node: Node,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        timeout_seconds: float = 0,
    ) -> Answer:
        self.arguments += argv
        text = (input or b"").decode()
        if "ASK_KEY=" in text:
            return Answer(
                0,
                f"fact munge_uid \nfact slurm_uid \nfact cgroup {self.cgroup}\n"
                f"fact slurm_version {self.versions[node.name]}\n",
                "",
            )
        purpose = {step_script(step.name, {}, ""): step.name for step in STEPS}
        step = next(name for body, name in purpose.items() if body.rstrip() in text)
        self.ran.append((step, node.name))
        self.scripts[step, node.name] = text
        return self.answer(step, node.name)


def test_steps_run_in_order_on_their_nodes() -> None:
    nodes = Nodes()
    install(CLUSTER, runner=nodes)
    assert list(dict.fromkeys(step for step, _ in nodes.ran)) == [step.name for step in STEPS]
    assert [node for step, node in nodes.ran if step in ("slurmctld", "nodes", "first_job")] == [
        "alpha"
    ] * 3
    assert sorted(node for step, node in nodes.ran if step == "users") == [
        "alpha",
        "gamma",
        "login",
    ]


def test_install_only_some_steps_and_nodes() -> None:
    nodes = Nodes()
    install(CLUSTER, steps=["munge", "slurmctld", "hosts"], nodes=["gamma"], runner=nodes)
    assert nodes.ran == [("hosts", "gamma"), ("munge", "gamma")]
    with pytest.raises(InstallError, match="'mungee' does not exist; did you mean 'munge'"):
        install(CLUSTER, steps=["mungee"], runner=nodes)
    with pytest.raises(InstallError, match="'gama' does not exist; did you mean 'gamma'"):
        install(CLUSTER, nodes=["gama"], runner=nodes)


def test_install_continues_without_an_unneeded_node() -> None:
    class WithoutLogin(Nodes):
        def __call__(self, node: Node, *words: object, **named: object) -> Answer:
            if node.name == "login":
                raise RemoteError("login: cannot be reached")
            return super().__call__(node, *words, **named)  # type: ignore[arg-type]

    nodes = WithoutLogin()
    outcomes = install(CLUSTER, nodes=["gamma"], steps=["hosts"], runner=nodes)
    assert outcomes == [
        Outcome("before", "login", "skipped", ("login: cannot be reached",)),
        Outcome("hosts", "gamma", "ok"),
    ]
    nodes.ran.clear()
    with pytest.raises(InstallError, match="login: cannot be reached"):
        install(CLUSTER, runner=nodes)
    assert nodes.ran == []


def test_munge_key_reaches_only_its_step_by_stdin() -> None:
    nodes = Nodes()
    install(CLUSTER, runner=nodes)
    lines = {
        name: next(line for line in text.splitlines() if line.startswith("MUNGE_KEY="))
        for (step, name), text in nodes.scripts.items()
        if step == "munge"
    }
    assert len(lines) == 3
    (line,) = set(lines.values())
    key = line.removeprefix("MUNGE_KEY=").strip("'")
    assert len(base64.b64decode(key)) == 1024
    assert not any(key in argument for argument in nodes.arguments)
    assert {step for (step, _), text in nodes.scripts.items() if key in text} == {"munge"}


def test_install_stops_after_a_failed_step() -> None:
    def answer(step: str, node: str) -> Answer:
        if (step, node) == ("packages", "gamma"):
            return Answer(100, "say not installed: munge\n", "E: Unable to locate package munge\n")
        if (step, node) == ("packages", "login"):
            raise RemoteError("login: cannot be reached")
        return Answer(0, "say why\nsay why\nresult changed\n", "")

    nodes = Nodes(answer=answer)
    seen: list[Outcome] = []
    with pytest.raises(InstallError) as error:
        install(CLUSTER, runner=nodes, report=seen.append)
    assert "step packages failed" in str(error.value)
    assert "gamma: not installed: munge; E: Unable to locate package munge" in str(error.value)
    assert "login: cannot be reached" in str(error.value)
    assert nodes.ran[-1][0] == "packages"
    assert Outcome("packages", "alpha", "changed", ("why",)) in seen


def test_install_refuses_different_releases_first() -> None:
    nodes = Nodes({"gamma": "21.08.5", "alpha": "23.11.4", "login": "23.11.4"})
    with pytest.raises(
        InstallError, match=r"different Slurm releases: gamma 21\.08\.5, alpha 23\.11\.4.*ways"
    ):
        install(CLUSTER, runner=nodes)
    assert nodes.ran == []
    with pytest.raises(InstallError, match="no Slurm package can be found on login"):
        install(CLUSTER, runner=Nodes({"gamma": "22.05.8", "alpha": "22.05.2", "login": ""}))


def test_install_names_every_node_that_is_too_old() -> None:
    nodes = Nodes({"gamma": "19.05.5", "alpha": "23.11.4", "login": "17.11.2"})
    with pytest.raises(InstallError) as error:
        install(CLUSTER, runner=nodes)
    text = str(error.value)
    assert "19.05.5 is too old" in text
    assert "17.11.2 is too old" in text
    assert ": gamma 19.05.5, alpha 23.11.4, login 17.11.2. Three ways" in text
    assert nodes.ran == []


@pytest.mark.parametrize(
    ("version", "cgroup", "limited"),
    [("21.08.5", "cgroup2fs", False), ("21.08.5", "tmpfs", True), ("22.05.8", "cgroup2fs", True)],
)
def test_slurm_without_cgroup_v2_has_no_limits(version: str, cgroup: str, limited: bool) -> None:
    nodes = Nodes(dict.fromkeys(("gamma", "alpha", "login"), version), cgroup=cgroup)
    outcomes = install(CLUSTER, runner=nodes)
    script = nodes.scripts["slurmctld", "alpha"]
    assert ("ProctrackType=proctrack/cgroup" in script) == limited
    assert ("ConstrainDevices=yes" in script) == limited
    assert ("TaskPlugin=task/affinity,task/cgroup" in script) == limited
    said = [reason for outcome in outcomes for reason in outcome.reasons]
    assert any("nothing keeps a job to its memory and its GPUs" in text for text in said) != limited


@pytest.mark.parametrize("version", ["17.11.2", "21.08.5", ""])
def test_install_steps_before_slurm_need_no_release(version: str) -> None:
    versions = dict.fromkeys(("gamma", "alpha", "login"), version)
    nodes = Nodes(versions | {"alpha": "23.11.4"}, cgroup="cgroup2fs")
    install(CLUSTER, steps=["hosts", "users", "clock"], runner=nodes)
    assert {step for step, _ in nodes.ran} == {"hosts", "users", "clock"}


def test_install_refuses_loopback_addresses() -> None:
    for node, cause in (
        (Node("localhost"), "is 127.0.0.1 here|is ::1 here"),
        (Node("no-such-host.invalid"), "no address here"),
    ):
        with pytest.raises(InstallError, match=cause):
            install(Cluster("lab", (node,)), runner=Nodes())


def test_install_refuses_ipv6_before_24_11() -> None:
    cluster = replace(
        CLUSTER, nodes=(*CLUSTER.nodes[:2], CLUSTER.nodes[2]._replace(address="fd00::4"))
    )
    nodes = Nodes()
    with pytest.raises(
        InstallError, match=r"Slurm 22\.05 cannot send its configuration to the nodes over IPv6"
    ):
        install(cluster, runner=nodes)
    assert nodes.ran == []
    install(cluster, steps=["hosts"], runner=nodes)
    install(cluster, runner=Nodes(dict.fromkeys(nodes.versions, "24.11.5")))


def test_install_prefers_the_ipv4_address_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [
        (socket.AF_INET6, 1, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_INET, 1, 6, "", ("192.0.2.1", 0)),
    ]
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **named: answers)
    nodes = Nodes({"a": "22.05.8"})
    install(
        Cluster("x", (Node("a", gpus=(GpuModel(),), cpus=1, memory_mb=900),)),
        steps=["hosts"],
        runner=nodes,
    )
    assert "NODES='a 192.0.2.1'" in nodes.scripts["hosts", "a"]


def test_install_skips_what_a_login_shell_prints() -> None:
    class Chatty(Nodes):
        def __call__(self, node: Node, *words: object, **named: object) -> Answer:
            answer = super().__call__(node, *words, **named)  # type: ignore[arg-type]
            return Answer(0, f"fact of the day: cats purr\n{answer.out}", "")

    assert {outcome.result for outcome in install(CLUSTER, runner=Chatty())} == {"ok"}
    body = step_script("before", {}, "").partition("\n# shellcheck")[0]
    done = subprocess.run(
        ["sh", "-c", f"printf title; {body}; echo result ok"], capture_output=True, text=True
    )
    assert "result ok" in done.stdout.splitlines()


def test_install_reports_another_running_installer() -> None:
    with pytest.raises(
        InstallError,
        match=r"gamma: another installer has been running there for 15 minutes \(/run/",
    ):
        install(
            CLUSTER,
            runner=Nodes(
                answer=lambda step, node: Answer(75 if node == "gamma" else 0, "result ok\n", "")
            ),
        )


@pytest.mark.parametrize(("size", "line"), [("128", "fact munge_key S0VZ"), ("0", None)])
def test_munge_key_of_a_running_cluster_is_kept(
    tmp_path: Path, size: str, line: str | None
) -> None:
    body = f"""ASK_KEY=yes
    stat() {{ echo {size}; }}
    base64() {{ echo S0VZ; }}
    {(STEPS_FOLDER / "before.sh").read_text()}
    run_step() {{ :; }}"""
    done = run_shell(body, tmp_path, "yes").stdout.splitlines()
    assert next((word for word in done if "munge_key" in word), None) == line


def test_slurmctld_step_keeps_an_edited_configuration(tmp_path: Path) -> None:
    step = (STEPS_FOLDER / "slurmctld.sh").read_text().replace("/etc/slurm", str(tmp_path))
    body = f"""{step}
    SLURM_CONF=new GRES_CONF=new CGROUP_CONF=new
    stop_daemon() {{ :; }}; start_daemon() {{ :; }}; install() {{ :; }}
    chown() {{ :; }}; verify() {{ :; }}"""
    for text in ("mine", "also mine"):
        (tmp_path / "slurm.conf").write_text(text)
        assert "result changed" in run_shell(body, tmp_path).stdout
    kept = sorted(file.read_text() for file in tmp_path.glob("slurm.conf.old*"))
    assert ((tmp_path / "slurm.conf").read_text(), kept) == ("new\n", ["also mine", "mine"])


def test_gpu_check_ends_before_slurmd_kills_it(tmp_path: Path) -> None:
    stubs = {
        "scontrol": 'echo "$*" >>F.calls',
        "sinfo": "echo 'gpu:2|idle|none'",
        "timeout": 'echo "$*" >F.limits; exit 124',
        "nvidia-smi": "",
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line.replace('F.', f'{tmp_path}/')}\n")
        (tmp_path / name).chmod(0o755)
    script = STEPS_FOLDER.parent / "gpu_check.sh"
    subprocess.run(["sh", script], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    _, grace, limit, *_ = (tmp_path / "limits").read_text().split()
    assert int(grace) + int(limit) <= 40  # slurm.conf(5): killed after 60 s
    assert "State=DRAIN Reason=gpu_check: 0 of 2 GPUs respond" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("log", "words"),
    [("fatal: no gres.conf\n", "say fatal: no gres.conf"), ("started\n", "say error: no answer")],
    ids=["its log", "the journal"],
)
def test_last_errors_are_those_of_this_start(tmp_path: Path, log: str, words: str) -> None:
    file = tmp_path / "slurmd.log"
    file.write_text("[2026-01-01T00:00:00] error: of an earlier start\n")
    body = f"""log_of() {{ echo {file}; }}
    has_systemd() {{ true; }}
    systemctl() {{ printf '%s' {shlex.quote(log)} >>{file}; }}
    journalctl() {{
        echo "$*" | grep -q -- "--unit slurmd --since @[0-9]" && echo 'error: no answer'
        echo 'slurmd.service: Failed with result exit-code.'
    }}
    check() {{ false; }}; apply() {{ start_daemon slurmd; }}
    verify() {{ say "$(last_errors_of slurmd)"; false; }}"""
    assert run_shell(body, tmp_path).stdout.strip() == words


@pytest.mark.parametrize("status", [0, 1])
def test_slurmd_step_waits_until_slurmd_listens(tmp_path: Path, status: int) -> None:
    step = (STEPS_FOLDER / "slurmd.sh").read_text()
    body = f"""CONTROLLER_ADDRESS=a; SLURM_CONF=; GRES_CONF=; CGROUP_CONF=; GPU_CHECK=
    {step}
    check() {{ [ -e "$F" ]; }}; apply() {{ : >"$F"; }}; wait_for() {{ shift; "$@"; }}
    last_errors_of() {{ echo "fatal: no device file"; }}
    scontrol() {{ return {status}; }}"""
    done = run_shell(body, tmp_path)
    expected = ["say fatal: no device file"] if status else ["result changed"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_first_job_has_a_task_for_each_gpu() -> None:
    line, tasks = first_job(CLUSTER)
    assert tasks == 3  # alpha has two CPUs for its four GPUs, login no GPU
    segments = line.split(" : ")
    assert [
        "--nodelist=gamma" in segments[0],
        "--nodelist=alpha" in segments[1],
        len(segments),
    ] == [True, True, 2]
    assert "--partition=small" in segments[0]
    assert "--ntasks=2 --gres=gpu:a100:4" in segments[1]


def run_shell(body: str, tmp_path: Path, dry_run: str = "no") -> "subprocess.CompletedProcess[str]":
    """The common part of all steps, then the functions in ``body``."""
    common = (STEPS_FOLDER / "common.sh").read_text()
    text = (
        f"DRY_RUN={dry_run}\nNODE=a\nCONTROLLER=a\nF='{tmp_path}/f'\n{common}\n{body}\nrun_step\n"
    )
    return subprocess.run(["sh", "-s"], input=text, capture_output=True, text=True, check=False)


COUNTING = """
check() {{ [ -e "$F" ] || {{ say missing; return 1; }}; }}
apply() {{ {apply}; }}
verify() {{ check; }}
"""


@pytest.mark.parametrize(
    ("apply", "dry_run", "stdout", "status"),
    [
        ('touch "$F"; echo noise', "no", "say missing\nresult changed\n", 0),
        ('touch "$F"', "yes", "say missing\nresult would-change\n", 0),
        ("true", "no", "say missing\nsay missing\n", 1),  # apply changed nothing
        ('false; touch "$F"', "no", "say missing\n", 1),  # a failing command ends apply
        ("fail 'no disk'", "no", "say missing\nsay no disk\n", 1),
    ],
)
def test_step_runs_check_apply_verify(
    tmp_path: Path, apply: str, dry_run: str, stdout: str, status: int
) -> None:
    done = run_shell(COUNTING.format(apply=apply), tmp_path, dry_run)
    assert (done.stdout, done.returncode) == (stdout, status), done.stderr
    assert (tmp_path / "f").exists() == (status == 0 and dry_run == "no")


def test_marked_block_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("mine\n# begin of ddp-slurm\nold\n# end of ddp-slurm\nalso mine\n")
    body = """check() { [ "$(block_of "$F")" = "$(printf 'new 1\\nnew 2')" ]; }
    chown() { :; }
    apply() { write_block "$F" "$(printf 'new 1\\nnew 2')"; }
    verify() { check; }"""
    assert run_shell(body, tmp_path).stdout == "result changed\n"
    text = file.read_text()
    assert text == "mine\nalso mine\n# begin of ddp-slurm\nnew 1\nnew 2\n# end of ddp-slurm\n"
    assert run_shell(body, tmp_path).stdout == "result ok\n"
    assert file.read_text() == text

    cut = "mine\n# begin of ddp-slurm\nold\nalso mine\n"
    file.write_text(cut)
    assert "but not '# end of ddp-slurm'" in run_shell(body, tmp_path).stdout
    assert file.read_text() == cut


def test_hosts_step_reports_another_address(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(
        "127.0.1.1 b\n10.0.0.9 x a y # b\n10.0.0.2 b\n#10.0.0.3 b\n"
        "# begin of ddp-slurm\n10.0.0.1 a\n10.0.0.2 b\n# end of ddp-slurm\n"
    )
    step = (STEPS_FOLDER / "hosts.sh").read_text().replace("/etc/hosts", '"$F"')
    done = run_shell(
        f"NODES='a 10.0.0.1\nb 10.0.0.2'\n{step}\nfull_name() {{ echo a; }}", tmp_path, "yes"
    )
    message = "another line that gives a the address 10.0.0.9, not 10.0.0.1\nresult ok\n"
    assert message in done.stdout
    assert done.stdout.count("say ") == 1


@pytest.mark.parametrize(
    ("node", "host_name", "matches"),
    [
        ("a", "a", True),
        ("a", "a.lab.org", True),
        ("a.lab.org", "a.lab.org", True),
        ("a.lab.org", "b.lab.org", False),
    ],
)
def test_hosts_step_compares_short_and_full_names(
    tmp_path: Path, node: str, host_name: str, matches: bool
) -> None:
    (tmp_path / "f").write_text(f"# begin of ddp-slurm\n10.0.0.1 {node}\n# end of ddp-slurm\n")
    step = (STEPS_FOLDER / "hosts.sh").read_text().replace("/etc/hosts", '"$F"')
    body = f"NODE={node}\nNODES='{node} 10.0.0.1'\n{step}\nfull_name() {{ echo {host_name}; }}"
    result = "ok" if matches else "would-change"
    assert run_shell(body, tmp_path, "yes").stdout.splitlines()[-1] == f"result {result}"


def test_users_step_accepts_another_group_id(tmp_path: Path) -> None:
    body = f"""MUNGE_UID=102 SLURM_UID=64030
    {(STEPS_FOLDER / "users.sh").read_text()}
    getent() {{ echo munge:x:105:; }}
    id() {{
        case $* in "-u munge") echo 102 ;; "-u slurm") echo 64030 ;; "-gn "*) echo "$2" ;; esac
    }}"""
    assert run_shell(body, tmp_path, "yes").stdout == "result ok\n"
    other = run_shell(body.replace("MUNGE_UID=102", "MUNGE_UID=7"), tmp_path, "yes").stdout
    reason = "user munge has id 102 and group munge, not id 7 and group munge"
    assert other == f"say {reason}\nresult would-change\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_reports_nothing() -> None:
    folder = STEPS_FOLDER.parent
    scripts = sorted([*folder.glob("*.sh"), *folder.glob("steps/*.sh")])
    assert len(scripts) >= len(STEPS) + 3
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.stdout == ""
