"""What the installer needs to know of all nodes before the first step."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from ddp_slurm.admin.install.steps import InstallError, error_text, run_shell
from ddp_slurm.admin.slurm_releases import (
    DEFAULT_RELEASE,
    FIRST_WITH_CGROUP_V2,
    SlurmReleaseError,
    slurm_release,
)
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, on_all

WAYS_OUT = (
    "Three ways: the same newer system on all nodes; packages of your own of one release on all "
    "(the guide, step 3); no Slurm on them: ddp-slurm submit --backend torchrun"
)


@dataclass(frozen=True, slots=True)
class NodeBefore:
    """What a node has; a field is empty where it does not exist."""

    munge_uid: str = ""
    slurm_uid: str = ""
    slurm_version: str = ""
    """Installed, or what its package sources offer."""
    cgroup: str = ""
    """The file system of /sys/fs/cgroup; cgroup2fs is version 2."""
    munge_key: str = ""
    """Base64, of the controller only."""


@dataclass(frozen=True, slots=True)
class Before:
    """All nodes, also those on which nothing is done: ids and releases must agree."""

    nodes: Mapping[str, NodeBefore]
    absent: Mapping[str, str]
    """The cause for each node that did not respond."""


def look(
    cluster: Cluster, needed: Collection[str], settings: Mapping[str, str], runner: Runner
) -> Before:
    """Ask every node. Raises InstallError where a ``needed`` one does not respond."""

    def ask_node(node: Node) -> Answer:
        ask_key = "yes" if node.name == cluster.controller_name else "no"
        return run_shell(node, "before", {**settings, "ASK_KEY": ask_key}, "", runner)

    nodes = {}
    absent = {}
    for name, answer in on_all(cluster.nodes, ask_node).items():
        if isinstance(answer, RemoteError):
            absent[name] = str(answer)
        elif answer.status != 0:
            absent[name] = f"{name}: {error_text(answer)}"
        else:
            nodes[name] = _parse(answer.out)
    causes = [cause for name, cause in absent.items() if name in needed]
    if causes:
        raise InstallError("\n".join(causes))
    return Before(nodes, absent)


def _parse(output: str) -> NodeBefore:
    """From lines ``fact KEY VALUE``; a login banner may print lines of any kind."""
    known = {entry.name for entry in fields(NodeBefore)}
    values = {}
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        key, _, value = rest.partition(" ")
        if kind == "fact" and key in known:
            values[key] = value.strip()
    return NodeBefore(**values)


def common_release(before: Before, *, dry_run: bool) -> str:
    """The Slurm release that every node has or would get.

    slurmctld accepts older slurmds, but a step over several releases breaks in ways that look like
    network errors, and the next upgrade excludes one of them: so one release on all nodes.

    Raises InstallError where they differ, where one is too old, or where a node has none and it is
    no dry run.
    """
    versions = {name: node.slurm_version for name, node in before.nodes.items()}
    unknown = [name for name, version in versions.items() if not version]
    if unknown and not dry_run:
        raise InstallError(
            f"no Slurm package can be found on {', '.join(unknown)}; enable the distribution's "
            "universe, or install packages of your own first (see the guide)"
        )
    problems, releases = _supported_releases(versions)
    if problems or len(releases) > 1:
        if len(releases) > 1:
            problems.append("the nodes would get different Slurm releases")
        listed = ", ".join(f"{name} {version or '?'}" for name, version in versions.items())
        raise InstallError(f"{'; '.join(problems)}: {listed}. {WAYS_OUT}")
    return releases.pop() if releases else DEFAULT_RELEASE


def without_control_groups(before: Before, release: str) -> list[str]:
    """The nodes with cgroup v2, where this release has no plugin for it."""
    if release >= FIRST_WITH_CGROUP_V2:
        return []
    return [name for name, node in before.nodes.items() if node.cgroup == "cgroup2fs"]


def _supported_releases(versions: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """The errors of these versions, each once, and the releases of all, also of wrong ones."""
    problems, releases = [], set()
    for version in filter(None, versions.values()):
        try:
            releases.add(slurm_release(version))
        except SlurmReleaseError as error:
            problems.append(str(error))
            releases.add(version)
    return list(dict.fromkeys(problems)), releases
