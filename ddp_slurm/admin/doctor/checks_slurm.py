"""Checks of Slurm itself: its daemons, its release, its configuration, its messages."""

import re

from ddp_slurm.admin.doctor.finding import Findings, Severity
from ddp_slurm.admin.doctor.snapshot import (
    HIGH_PORT,
    SLURMCTLD_PORT,
    SLURMD_PORT,
    Snapshot,
    config_of,
)
from ddp_slurm.admin.slurm_releases import RELEASES

INSTALL = "ddp-slurm cluster install"


def reachable(snapshot: Snapshot) -> Findings:
    """Every node answers."""
    for name, cause in snapshot.unreachable.items():
        yield (
            Severity.ERROR,
            (name,),
            cause.removeprefix(f"{name}: "),
            "start it, or correct address and ssh in cluster.yaml",
        )


def controller(snapshot: Snapshot) -> Findings:
    """slurmctld answers every node."""
    asked = {
        name: block
        for name, facts in snapshot.facts.items()
        if (block := facts.block("slurm.ping"))
    }
    if not asked:
        yield Severity.SKIPPED, (), "Slurm is installed nowhere", ""
    deaf = tuple(name for name, block in asked.items() if " UP" not in block.text)
    if deaf and len(deaf) == len(asked):
        where = snapshot.cluster.controller_name
        yield (
            Severity.ERROR,
            (where,),
            f"slurmctld answers nobody: {_last_line(asked[deaf[0]].text)}",
            f"on {where}: systemctl status slurmctld; the end of /var/log/slurm/slurmctld.log",
        )
    elif deaf:
        yield (
            Severity.ERROR,
            deaf,
            f"slurmctld does not answer: {_last_line(asked[deaf[0]].text)}",
            f"{INSTALL} --step hosts --step slurmd",
        )


_REASONS = (
    (
        "Low RealMemory",
        "slurm.conf claims more memory than there is: ddp-slurm cluster probe, then install",
    ),
    (
        "Low socket",
        "slurm.conf claims more cores than there are: ddp-slurm cluster probe, then install",
    ),
    (
        "gres/gpu count",
        "fewer GPUs than slurm.conf says: look at nvidia-smi, then ddp-slurm cluster probe and install",
    ),
    (
        "Not responding",
        "is the machine up, does slurmd run, do the ports pass? then: scontrol update state=resume",
    ),
    (
        "hung",
        "a process does not end, often in the GPU driver: restart the machine, then resume the node",
    ),
    (
        "Kill task failed",
        "a process does not end, often in the GPU driver: restart the machine, then resume the node",
    ),
    ("Prolog error", "the prolog failed: slurmd.log on the node says why"),
)


def node_states(snapshot: Snapshot) -> Findings:
    """Every node takes jobs."""
    if not snapshot.slurm_nodes:
        yield Severity.SKIPPED, (), "slurmctld does not answer", ""
    for node in snapshot.cluster.nodes:
        seen = snapshot.slurm_nodes.get(node.name)
        if snapshot.slurm_nodes and seen is None:
            yield Severity.ERROR, (node.name,), "slurm.conf does not have this node", INSTALL
        if seen is None or not re.search(
            r"DOWN|DRAIN|FAIL|UNKNOWN|NOT_RESPONDING|INVAL|\*", seen.state
        ):
            continue
        reason = seen.reason or ""
        known = next((fix for word, fix in _REASONS if word in reason), None)
        by_slurm = re.search(r"\(by slurm\)$", reason) or known or not reason
        yield (
            Severity.ERROR if by_slurm else Severity.WARNING,
            (node.name,),
            f"{seen.state}: {reason or 'Slurm gives no reason'}",
            known or f"scontrol update nodename={node.name} state=resume, once the reason is gone",
        )


def release(snapshot: Snapshot) -> Findings:
    """One Slurm release on all nodes: slurmctld refuses slurmds that are too old or newer than itself."""
    versions: dict[str, list[str]] = {}
    for name, facts in snapshot.facts.items():
        block = facts.block("slurmd.version") or facts.block("slurmctld.version")
        running = snapshot.slurm_nodes[name].version if name in snapshot.slurm_nodes else None
        installed = (
            block.text.split()[-1] if block and block.status == 0 and block.text else running
        )
        if installed is None:
            yield Severity.ERROR, (name,), "slurmd is not installed", f"{INSTALL} --step packages"
            continue
        versions.setdefault(installed, []).append(name)
        if running and running != installed:
            yield (
                Severity.WARNING,
                (name,),
                f"slurmd {running} still runs, {installed} is installed",
                "restart slurmd",
            )
    if len(versions) > 1:
        odd = _odd_ones(versions)
        releases = {version[:5] for version in versions}
        listed = ", ".join(
            f"{version} on {', '.join(names)}" for version, names in versions.items()
        )
        yield (
            Severity.ERROR if len(releases) > 1 else Severity.WARNING,
            odd,
            f"different Slurm versions: {listed}",
            "install one release on all nodes; where the distributions differ, one packaging for all (see the guide)",
        )
    for version, names in versions.items():
        if version[:5] < RELEASES[0]:
            yield (
                Severity.ERROR,
                tuple(names),
                f"Slurm {version} cannot start one step over all parts of a het job",
                f"install {RELEASES[0]} or later",
            )


def cgroup(snapshot: Snapshot) -> Findings:
    """A machine with cgroup v2 needs Slurm's plugin for it, or slurmd does not start."""
    for name, facts in snapshot.facts.items():
        plugins = facts.values.get("cgroup_plugin", ())
        if facts.block("slurmd.version") is None or facts.first("cgroup") != "cgroup2fs":
            continue
        if not any(path.endswith("cgroup_v2.so") for path in plugins):
            yield (
                Severity.ERROR,
                (name,),
                "the machine has cgroup v2, this Slurm has no plugin for it (cgroup_v2.so)",
                "install Slurm 22.05 or later, built with the dbus headers; do not go back to v1 in the boot loader",
            )


def munge_key(snapshot: Snapshot) -> Findings:
    """A credential of one node is accepted by all others, and nobody but munge can read the key."""
    if snapshot.credential_from is None:
        munged = tuple(name for name, facts in snapshot.facts.items() if facts.first("munged"))
        if munged:
            yield Severity.ERROR, munged, "munged answers on no node", f"{INSTALL} --step munge"
        else:
            yield Severity.SKIPPED, (), "munge is installed nowhere", ""
    for name, facts in snapshot.facts.items():
        block = facts.block("unmunge")
        if snapshot.credential_from and (block is None or "Failed to access" in block.text):
            yield (
                Severity.ERROR,
                (name,),
                "munged does not run",
                f"{INSTALL} --step munge --node {name}",
            )
        elif block and "Invalid credential" in block.text:
            yield (
                Severity.ERROR,
                (name,),
                f"another munge key than {snapshot.credential_from}: Invalid credential",
                f"{INSTALL} --step munge; munged reads its key at start only",
            )
        elif block and block.status and not re.search(r"Expired|Rewound|Replayed", block.text):
            yield (
                Severity.ERROR,
                (name,),
                f"munge: {_last_line(block.text)}",
                f"{INSTALL} --step munge",
            )
        key = facts.first("munge_key")
        if key and int(key.split()[0], 8) & 0o077:
            mode = key.split()[0]
            yield (
                Severity.ERROR,
                (name,),
                f"/etc/munge/munge.key has mode {mode}: others can read it",
                f"{INSTALL} --step munge",
            )


def configuration(snapshot: Snapshot) -> Findings:
    """All nodes run with the controller's configuration."""
    differing = tuple(
        name
        for name, facts in snapshot.facts.items()
        if config_of(facts).get("HASH_VAL", "Match").startswith("Different")
    )
    if differing:
        yield (
            Severity.ERROR,
            differing,
            "slurm.conf differs from the one slurmctld runs with",
            f"{INSTALL} --step slurmctld --step slurmd; nodes need no copy of their own",
        )
    copies: dict[str, dict[str, list[str]]] = {}
    for name, facts in snapshot.facts.items():
        for file in facts.values.get("config_file", ()):
            path, checksum, size, *_ = file.split()
            copies.setdefault(path, {}).setdefault(f"{checksum} {size}", []).append(name)
    for path, versions in copies.items():
        if len(versions) > 1 and not set(_odd_ones(versions)) <= set(differing):
            yield (
                Severity.WARNING,
                _odd_ones(versions),
                f"{path} is not the same on all nodes",
                f"{INSTALL} --step slurmctld --step slurmd; nodes need no copy of their own",
            )


def firewall(snapshot: Snapshot) -> Findings:
    """Between every two nodes the ports of Slurm and of training pass. A refusal has passed: nobody listens there."""
    blocked: dict[tuple[str, str], list[str]] = {}
    for name, facts in snapshot.facts.items():
        for line in facts.values.get("port", ()):
            peer, port, answer = line.split()
            if answer in ("silent", "unreachable") and peer not in snapshot.unreachable:
                blocked.setdefault((name, peer), []).append(port)
    for (name, peer), ports in blocked.items():
        what = {
            str(SLURMCTLD_PORT): "slurmctld",
            str(SLURMD_PORT): "slurmd",
            str(HIGH_PORT): "torch, NCCL and srun",
        }
        listed = ", ".join(f"{port} ({what.get(port, 'tcp')})" for port in sorted(ports))
        yield (
            Severity.ERROR,
            (peer,),
            f"{name} gets no answer from {peer} on port {listed}",
            f"on {peer}, let the cluster's own network through: ufw allow from NETWORK",
        )


def _odd_ones(groups: dict[str, list[str]]) -> tuple[str, ...]:
    """Everybody outside the largest group."""
    largest = max(groups.values(), key=len)
    return tuple(name for names in groups.values() if names is not largest for name in names)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no answer"
