"""``ddp-slurm cluster probe``: cluster.yaml from the machines themselves."""

import socket
import sys
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from pathlib import Path

from ddp_slurm.admin.facts import Facts, gather
from ddp_slurm.admin.probe_hosts import ProbeError, nodes_of_arguments
from ddp_slurm.admin.probed_cluster import gpu_warning, probed_cluster
from ddp_slurm.admin.probed_yaml import probed_cluster_yaml
from ddp_slurm.cluster import Cluster, ClusterError, Node
from ddp_slurm.cluster.machines import ClusterFile
from ddp_slurm.console import say, show
from ddp_slurm.files import write_whole
from ddp_slurm.schema.yaml_file import load_yaml, validate
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, on_all, run


def probe(
    hosts: Sequence[str], file: Path | None, output: str | None, *, yes: bool, runner: Runner = run
) -> None:
    """Ask, compare, write.

    Raises ProbeError when no node responded, or when a file would be overwritten and nobody can be
    asked.
    """
    path = Path(output or file or "cluster.yaml")
    base = file
    if base is None and output != "-" and path.exists():
        base = path
    known = load_known(base) if base else None
    asked = nodes_of_arguments(hosts, known)
    if not asked:
        asked = list(known.nodes) if known else [Node(socket.gethostname())]
    facts_of = _ask(asked, runner)
    if not facts_of:
        raise ProbeError("no node responded; nothing was written")
    cluster = probed_cluster(known, asked, facts_of)
    text = probed_cluster_yaml(cluster, _by_final_name(known, facts_of))
    if output == "-":
        print(text, end="")
        return
    _write(path, text, yes=yes)
    try:
        Cluster.load(path)
    except ClusterError as error:
        say(f"warning: the file needs changes: {error}")


def _ask(nodes: Sequence[Node], runner: Runner) -> dict[str, Facts]:
    """The facts of each node that responds, by its name; warnings for the others."""
    facts_of = {}
    for name, answer in on_all(nodes, lambda node: gather(node, runner=runner)).items():
        if isinstance(answer, RemoteError):
            say(f"warning: {answer}")
            continue
        facts_of[name] = answer
        warning = gpu_warning(answer)
        if warning:
            say(f"warning: {name}: {warning}; its gpus are left unchanged")
    return facts_of


def load_known(path: Path) -> Cluster:
    """An earlier cluster.yaml. Here it may have no GPUs: the first probe may precede the driver.

    Raises ClusterError for every other error.
    """
    try:
        return Cluster.load(path)
    except ClusterError as error:
        is_only_error = len(str(error).splitlines()) == 1
        if not (is_only_error and "no node has a GPU" in str(error)):
            raise
    checked = validate(ClusterFile.read, load_yaml(path, ClusterError), ClusterError)
    nodes: list[Node] = []
    for entry in checked.nodes:
        nodes += entry.expand(checked.ssh)
    return Cluster(checked.name, tuple(nodes), checked.controller)


def _by_final_name(known: Cluster | None, facts_of: Mapping[str, Facts]) -> dict[str, Facts]:
    """The facts under the names of cluster.yaml: those of the file, else the host names."""
    known_names = {node.name for node in known.nodes} if known else set()
    renamed = {}
    for name, facts in facts_of.items():
        final_name = name if name in known_names else facts.host or name
        renamed[final_name] = facts
    return renamed


def _write(path: Path, text: str, *, yes: bool) -> None:
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if old == text:
        say(f"{path}: nothing changed")
        return
    if old is not None:
        before, after = old.splitlines(keepends=True), text.splitlines(keepends=True)
        lines = unified_diff(before, after, f"{path} (now)", f"{path} (probed)")
        show("".join(lines).removesuffix("\n"))
        if not yes:
            _confirm(path)
    write_whole(path, text)
    say(f"{path}: written")


def _confirm(path: Path) -> None:
    """Raises ProbeError where the person says no, or cannot be asked."""
    if not sys.stdin.isatty():
        raise ProbeError(f"{path}: already exists and differs as shown; pass --yes to overwrite it")
    print(f"Overwrite {path}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ProbeError(f"{path}: left unchanged")
