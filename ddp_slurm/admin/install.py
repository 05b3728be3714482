"""From bare machines to the first heterogeneous job: the shell steps of cluster_setup/steps, run over ssh.

A step looks first and changes only what is missing, so that the whole may be run again at any time, also after it was
broken off. The order matters: ids before packages, packages before the key, the key before the daemons.
"""

import base64
import secrets
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from ipaddress import ip_address

from ddp_slurm.admin.configs import render_configs
from ddp_slurm.admin.slurm_releases import DEFAULT_RELEASE, slurm_release
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.errors import DdpSlurmError, did_you_mean
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, on_all, run, run_script

MUNGE_KEY_BYTES = 1024
HEALTH_CHECK = "/usr/local/sbin/gpu_check.sh"
"""Where the step slurmd puts cluster_setup/gpu_check.sh on every node."""

DEFAULT_MUNGE_ID = 64031
DEFAULT_SLURM_ID = 64030
"""User ids where no node has the users yet; Debian's packages choose 64030 for slurm too."""

STEP_TIMEOUT_SECONDS = 1800.0
"""apt on a slow line takes its time."""

LOCK_HELD = 75
LOCK = ("flock", "-o", "-w", "900", "-E", str(LOCK_HELD), "/run/ddp-slurm-install.lock")
"""The shell of an installer that was broken off goes on by itself; the next one waits for it."""


class InstallError(DdpSlurmError):
    """The installation stopped; its text names the step, the nodes and their causes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One file of cluster_setup/steps."""

    name: str
    purpose: str
    on_controller_only: bool = False
    changes_nothing: bool = False


STEPS = (
    Step("hosts", "names and addresses of all nodes in /etc/hosts"),
    Step("users", "the same ids for munge and slurm"),
    Step("clock", "chrony, which follows the controller"),
    Step("packages", "Slurm and munge"),
    Step("munge", "one key for all nodes"),
    Step(
        "slurmctld", "the configuration, and the daemon that hands it out", on_controller_only=True
    ),
    Step("slurmd", "the daemon of each node"),
    Step("nodes", "every node registered and ready", on_controller_only=True),
    Step("first_job", "one step over all nodes", on_controller_only=True, changes_nothing=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did on a node: ``ok``, ``changed``, ``would-change``, ``skipped`` or ``failed``, with its reasons."""

    step: str
    node: str
    result: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Before:
    """What a node told before the first step."""

    munge_uid: str = ""
    slurm_uid: str = ""
    slurm_version: str = ""
    munge_key: str = ""


def chosen_steps(names: Sequence[str]) -> tuple[Step, ...]:
    """The steps of these names in their own order, all without any. Raises InstallError for an unknown name."""
    known = [step.name for step in STEPS]
    for name in names:
        if name not in known:
            raise InstallError(f"step {name!r} is not known{did_you_mean(name, known)}")
    return tuple(step for step in STEPS if not names or step.name in names)


def chosen_nodes(cluster: Cluster, names: Sequence[str]) -> tuple[Node, ...]:
    """The nodes of these names, all without any. Raises InstallError for a name that the cluster lacks."""
    known = [node.name for node in cluster.nodes]
    for name in names:
        if name not in known:
            raise InstallError(f"node {name!r} is not in the cluster{did_you_mean(name, known)}")
    return tuple(node for node in cluster.nodes if not names or node.name in names)


def install(
    cluster: Cluster,
    *,
    nodes: Sequence[str] = (),
    steps: Sequence[str] = (),
    dry_run: bool = False,
    report: Callable[[Outcome], None] = lambda outcome: None,
    runner: Runner = run,
) -> list[Outcome]:
    """Run the steps, each on all nodes at once, and stop after the first that fails anywhere.

    ``nodes`` and ``steps`` narrow it; steps of the controller are left out where it is not among the nodes. Raises
    InstallError when a step fails, when one of ``nodes`` or the controller cannot be reached, when the nodes would get
    different releases, or one that cannot do with their addresses.
    """
    wanted = chosen_nodes(cluster, nodes)
    plan = chosen_steps(steps)
    settings = _common_settings(cluster, dry_run=dry_run)
    needed = {node.name for node in wanted} | {cluster.controller_name}
    before, absent = _look(cluster, needed, settings, runner)
    outcomes = [Outcome("before", name, "skipped", (cause,)) for name, cause in absent.items()]
    for outcome in outcomes:
        report(outcome)
    version = _one_release(before, dry_run=dry_run)
    settings |= _settings_of_ids(cluster, before) | _settings_of_configs(cluster, version)
    if "enable_configless" not in settings["SLURM_CONF"] and any(
        s.name in ("slurmctld", "slurmd") for s in plan
    ):
        raise InstallError(
            f"Slurm {version} cannot hand its configuration to the nodes over IPv6, 24.11 and later can: give IPv4 "
            "addresses in cluster.yaml, or install a later release first (see the guide)"
        )
    settings["MUNGE_KEY"] = before[cluster.controller_name].munge_key or _new_munge_key()
    for step in plan:
        here = [
            n for n in wanted if not step.on_controller_only or n.name == cluster.controller_name
        ]
        for outcome in _run_step(step, here, settings, dry_run=dry_run, runner=runner):
            outcomes.append(outcome)
            report(outcome)
        failed = [outcome for outcome in outcomes if outcome.result == "failed"]
        if failed:
            causes = [f"{o.node}: {'; '.join(o.reasons) or 'no reason given'}" for o in failed]
            raise InstallError(
                "\n".join([f"step {step.name} failed; the ones after it were not begun", *causes])
            )
    return outcomes


def _look(
    cluster: Cluster, needed: Collection[str], settings: Mapping[str, str], runner: Runner
) -> tuple[dict[str, _Before], dict[str, str]]:
    """Ask every node, also those that nothing is done on: ids and releases must agree on all.

    Returns what they told, and the cause for each one that did not answer. Raises InstallError for a ``needed`` one.
    """

    def ask(node: Node) -> Answer:
        is_controller = node.name == cluster.controller_name
        return _run_shell(
            node, "before", {**settings, "ASK_KEY": "yes" if is_controller else "no"}, "", runner
        )

    answers = on_all(cluster.nodes, ask)
    results = {name: answer for name, answer in answers.items() if isinstance(answer, Answer)}
    absent = {
        name: str(answer) for name, answer in answers.items() if isinstance(answer, RemoteError)
    }
    absent |= {
        name: f"{name}: {_last_words(r.err)}" for name, r in results.items() if r.status != 0
    }
    faults = [cause for name, cause in absent.items() if name in needed]
    if faults:
        raise InstallError("\n".join(faults))
    return {name: _told_before(r.out) for name, r in results.items() if name not in absent}, absent


def _told_before(out: str) -> _Before:
    """A login banner may have lines of any kind."""
    pairs = (
        line.removeprefix("fact ").partition(" ")
        for line in out.splitlines()
        if line.startswith("fact ")
    )
    known = {entry.name for entry in fields(_Before)}
    return _Before(**{key: value.strip() for key, _, value in pairs if key in known})


def _one_release(before: Mapping[str, _Before], *, dry_run: bool) -> str:
    """The Slurm release that every node has or would get.

    slurmctld takes older slurmds, but a step over several releases breaks in ways that look like network faults, and
    the next upgrade shuts one of them out: so one release on all nodes.
    """
    versions = {name: told.slurm_version for name, told in before.items()}
    unknown = [name for name, version in versions.items() if not version]
    if unknown and not dry_run:
        raise InstallError(
            f"no Slurm package can be found on {', '.join(unknown)}; enable the distribution's universe, or install "
            "packages of your own first (see the guide)"
        )
    releases = {slurm_release(version): name for name, version in versions.items() if version}
    if len(releases) > 1:
        listed = ", ".join(f"{name} {version or '?'}" for name, version in versions.items())
        raise InstallError(
            f"the nodes would get different Slurm releases: {listed}; install one release on all of them first (see "
            "the guide)"
        )
    return next(iter(releases), DEFAULT_RELEASE)


def _common_settings(cluster: Cluster, *, dry_run: bool) -> dict[str, str]:
    addresses = {node.name: _address(node) for node in cluster.nodes}
    return {
        "NODES": "\n".join(f"{name} {address}" for name, address in addresses.items()),
        "CONTROLLER": cluster.controller_name,
        "CONTROLLER_ADDRESS": addresses[cluster.controller_name],
        "DRY_RUN": "yes" if dry_run else "no",
    }


def _address(node: Node) -> str:
    """A node's address for /etc/hosts, looked up where cluster.yaml has only its name. Raises InstallError."""
    name = node.address or node.name
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise InstallError(
            f"node {node.name!r}: {name!r} has no address here; give it 'address:' in cluster.yaml"
        ) from None
    # IPv4 where there is both: Slurm is told of IPv6 only where cluster.yaml has such an address
    found = str(min(answers, key=lambda answer: answer[0] != socket.AF_INET)[4][0])
    if ip_address(found.split("%")[0]).is_loopback:
        raise InstallError(
            f"node {node.name!r}: {name!r} is {found} here, where no other node reaches it; give 'address:'"
        )
    return found


def _settings_of_ids(cluster: Cluster, before: Mapping[str, _Before]) -> dict[str, str]:
    """The controller's own ids where it has the users: a running cluster keeps them."""
    here = before[cluster.controller_name]
    return {
        "MUNGE_UID": here.munge_uid or str(DEFAULT_MUNGE_ID),
        "SLURM_UID": here.slurm_uid or str(DEFAULT_SLURM_ID),
    }


def _settings_of_configs(cluster: Cluster, version: str) -> dict[str, str]:
    files = render_configs(cluster, slurm_version=version, health_check=HEALTH_CHECK)
    line, tasks = first_job(cluster)
    return {
        "SLURM_CONF": files["slurm.conf"],
        "GRES_CONF": files["gres.conf"],
        "CGROUP_CONF": files["cgroup.conf"],
        "GPU_CHECK": resources.files("ddp_slurm.cluster_setup")
        .joinpath("gpu_check.sh")
        .read_text(encoding="utf-8"),
        "SRUN": line,
        "TASKS": str(tasks),
    }


def first_job(cluster: Cluster) -> tuple[str, int]:
    """An srun line that starts a task for each GPU of the cluster in one step, and the number of tasks.

    Each task prints its rank and host. Nodes with fewer CPUs than GPUs get a task a CPU.
    """
    segments, tasks = [], 0
    for node in cluster.nodes:
        if not node.gpus:
            continue
        here = min(node.gpu_count, node.cpus or node.gpu_count)
        tasks += here
        options = [
            f"--nodelist={node.name}",
            "--nodes=1",
            f"--ntasks={here}",
            f"--gres={node.gres}",
        ]
        options += ["--cpus-per-task=1", "--mem=64M", "--time=5"]
        if node.partition:
            options.append(f"--partition={node.partition}")
        words = [
            *options,
            "--job-name=first_job",
            "sh",
            "-c",
            'echo "rank $SLURM_PROCID on $(uname -n)"',
        ]
        segments.append(shlex.join(words))
    return "srun " + " : ".join(segments), tasks


def _new_munge_key() -> str:
    return base64.b64encode(secrets.token_bytes(MUNGE_KEY_BYTES)).decode()


_SETTINGS_OF_STEP = {
    "users": ("MUNGE_UID", "SLURM_UID"),
    "munge": ("MUNGE_KEY",),
    "slurmctld": ("SLURM_CONF", "GRES_CONF", "CGROUP_CONF"),
    "slurmd": ("SLURM_CONF", "GRES_CONF", "CGROUP_CONF", "GPU_CHECK"),
    "first_job": ("SRUN", "TASKS"),
}
_SETTINGS_OF_ALL = ("NODES", "CONTROLLER", "CONTROLLER_ADDRESS", "DRY_RUN")


def _run_step(
    step: Step, nodes: Iterable[Node], settings: Mapping[str, str], *, dry_run: bool, runner: Runner
) -> list[Outcome]:
    if dry_run and step.changes_nothing:
        return [
            Outcome(step.name, node.name, "skipped", ("a dry run submits nothing",))
            for node in nodes
        ]
    given = {
        key: settings[key] for key in (*_SETTINGS_OF_ALL, *_SETTINGS_OF_STEP.get(step.name, ()))
    }
    answers = on_all(nodes, lambda node: _run_shell(node, step.name, given, "run_step", runner))
    return [_outcome(step, name, answer) for name, answer in answers.items()]


def _outcome(step: Step, node: str, answer: Answer | RemoteError) -> Outcome:
    if isinstance(answer, RemoteError):
        return Outcome(step.name, node, "failed", (str(answer),))
    # once, though a step looks before and after
    reasons = tuple(
        dict.fromkeys(line[4:] for line in answer.out.splitlines() if line.startswith("say "))
    )
    result = next(
        (line[7:] for line in answer.out.splitlines() if line.startswith("result ")), None
    )
    if answer.status != 0 or result is None:
        return Outcome(
            step.name, node, "failed", tuple(dict.fromkeys((*reasons, _last_words(answer.err))))
        )
    return Outcome(step.name, node, result, reasons)


def _run_shell(
    node: Node, name: str, settings: Mapping[str, str], call: str, runner: Runner
) -> Answer:
    result = run_script(
        node,
        step_script(name, {"NODE": node.name, **settings}, call),
        as_root=True,
        wrapper=LOCK,
        timeout_seconds=STEP_TIMEOUT_SECONDS,
        runner=runner,
    )
    if result.status == LOCK_HELD:  # flock itself says nothing
        raise RemoteError(
            f"{node.name}: another installer has been at work there for 15 minutes ({LOCK[-1]})"
        )
    return result


def step_script(name: str, settings: Mapping[str, str], call: str = "run_step") -> str:
    """The whole text that a node's shell reads: settings, the common part, the step, and the call."""
    folder = resources.files("ddp_slurm.cluster_setup").joinpath("steps")
    parts = [folder.joinpath(f"{part}.sh").read_text(encoding="utf-8") for part in ("common", name)]
    # echo: what the login shell printed before may have no end of line
    return "\n".join(
        [*(f"{key}={shlex.quote(value)}" for key, value in settings.items()), "echo", *parts, call]
    )


def _last_words(text: str, lines: int = 4) -> str:
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(said[-lines:]) or "it said nothing"
