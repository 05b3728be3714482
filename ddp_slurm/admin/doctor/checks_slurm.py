"""Checks of Slurm itself: its daemons, its release, its configuration, its messages."""

import re

from ddp_slurm.admin.doctor.finding import (
    Finding,
    Findings,
    Severity,
    error,
    listed,
    outside_largest,
    skipped,
    warning,
)
from ddp_slurm.admin.doctor.snapshot import Snapshot, read_config
from ddp_slurm.admin.facts import Facts
from ddp_slurm.admin.slurm_releases import RELEASES
from ddp_slurm.slurm_client.records import NodeRecord, is_switched_off, unavailable_words
from ddp_slurm.ssh.run import last_lines

INSTALL = "ddp-slurm cluster install"
SAME_CONFIGURATION = f"{INSTALL} --step slurmctld --step slurmd; nodes need no copy of their own"


def reachable(snapshot: Snapshot) -> Findings:
    """Every node responds, except those that power saving has switched off."""
    for name, cause in snapshot.unreachable.items():
        record = snapshot.slurm_nodes.get(name)
        if record and is_switched_off(record.state):
            yield skipped(f"switched off by Slurm's power saving: {record.state}", name)
            continue
        fix = "start it, or correct address and ssh in cluster.yaml"
        yield error(name, cause.removeprefix(f"{name}: "), fix)


def daemons(snapshot: Snapshot) -> Findings:
    """slurmd runs on every node that has it."""
    for name, facts in snapshot.facts.items():
        if facts.first("slurmd_runs") != "no":
            continue
        last_error = _last_error_of_slurmd(facts)
        cause = "slurmd is not running"
        if last_error:
            cause += f"; its last error: {last_error}"
        elif facts.first("slurmd_log_hidden"):
            cause += "; only root can read its log"
        fix = f"journalctl -u slurmd and /var/log/slurm/slurmd.log; {INSTALL} --step slurmd"
        yield error(name, cause, fix)


def _last_error_of_slurmd(facts: Facts) -> str:
    """Since its last start; what ended it first, as it also reports errors that do not matter."""
    log = _from_last(r"slurmd version \S+ started", facts.block_lines("slurmd.log"))
    journal = _from_last(r"^(Starting|Started) |skipped", facts.block_lines("slurmd.journal"))
    for pattern in ("fatal|skipped because", "error"):
        found = [line for line in [*log, *journal] if re.search(pattern, line)]
        if found:
            return found[-1].strip()
    return ""


def _from_last(pattern: str, lines: list[str]) -> list[str]:
    """The lines from the last one on that has the pattern; all where none has."""
    first = max((i for i, line in enumerate(lines) if re.search(pattern, line)), default=0)
    return lines[first:]


def controller(snapshot: Snapshot) -> Findings:
    """slurmctld responds to every node."""
    pings = {}
    for name, facts in snapshot.facts.items():
        block = facts.block("slurm.ping")
        if block:
            pings[name] = block.text
    if not pings:
        yield skipped("Slurm is installed on no node")
    without_response = [name for name, text in pings.items() if " UP" not in text]
    if not without_response:
        return
    ping = last_lines(pings[without_response[0]]) or "no answer"
    if len(without_response) == len(pings):
        host = snapshot.cluster.controller_name
        fix = f"on {host}: systemctl status slurmctld; the end of /var/log/slurm/slurmctld.log"
        yield error(host, f"slurmctld does not respond to any node: {ping}", fix)
    else:
        fix = f"{INSTALL} --step hosts --step slurmd"
        yield error(without_response, f"slurmctld does not respond: {ping}", fix)


_PROBE = "ddp-slurm cluster probe, then install"
_HANGING = "a process does not end, often in the GPU driver: restart the machine, resume the node"
_FIX_OF_REASON = {
    "Low RealMemory": f"slurm.conf has more memory than the machine: {_PROBE}",
    "Low socket": f"slurm.conf has more cores than the machine: {_PROBE}",
    "gres/gpu count": f"fewer GPUs than in slurm.conf: look at nvidia-smi, then {_PROBE}",
    "Not responding": "is the machine up, does slurmd run, are the ports open? then: scontrol "
    "update state=resume",
    "hung": _HANGING,
    "Kill task failed": _HANGING,
    "Prolog error": "the prolog failed: slurmd.log on the node has the cause",
}
"""By a part of the reason that Slurm gives for a node's state."""
_MAINTENANCE = {"MAINT", "MAINTENANCE"}


def node_states(snapshot: Snapshot) -> Findings:
    """Every node takes jobs."""
    if not snapshot.slurm_nodes:
        yield skipped("slurmctld does not respond")
        return
    for node in snapshot.cluster.nodes:
        record = snapshot.slurm_nodes.get(node.name)
        if record is None:
            yield error(node.name, "this node is not in slurm.conf", INSTALL)
            continue
        words = unavailable_words(record.state)
        if words and words <= _MAINTENANCE:
            cause = f"{record.state}: in a maintenance reservation"
            yield warning(node.name, cause, "scontrol show reservation")
        elif words:
            yield _unavailable(record)


def _unavailable(record: NodeRecord) -> Finding:
    """An error where Slurm set the reason, a warning where an admin did."""
    fixes = [fix for text, fix in _FIX_OF_REASON.items() if text in record.reason]
    known = fixes[0] if fixes else None
    is_of_slurm = known or record.reason_by == "slurm" or not record.reason
    reason = record.reason or "Slurm gives no reason"
    if record.reason_by:
        reason += f" (by {record.reason_by})"
    resume = f"scontrol update nodename={record.name} state=resume, once the reason is gone"
    report = error if is_of_slurm else warning
    return report(record.name, f"{record.state}: {reason}", known or resume)


def release(snapshot: Snapshot) -> Findings:
    """One Slurm release on all nodes: slurmctld refuses slurmds that are too old or too new."""
    nodes_of_version: dict[str, list[str]] = {}
    for name, facts in snapshot.facts.items():
        seen = snapshot.slurm_nodes.get(name)
        running = seen.version if seen else None
        installed = _installed_version(facts) or running
        if installed is None:
            yield error(name, "slurmd is not installed", f"{INSTALL} --step packages")
            continue
        nodes_of_version.setdefault(installed, []).append(name)
        if running and running != installed:
            cause = f"slurmd {running} still runs, {installed} is installed"
            yield warning(name, cause, "restart slurmd")
    if len(nodes_of_version) > 1:
        releases = {version[:5] for version in nodes_of_version}
        yield Finding(
            Severity.ERROR if len(releases) > 1 else Severity.WARNING,
            outside_largest(nodes_of_version),
            f"different Slurm versions: {listed(nodes_of_version)}",
            "install one release on all nodes; where the distributions differ, one packaging for "
            "all (see the guide)",
        )
    for version, names in nodes_of_version.items():
        if version[:5] < RELEASES[0]:
            cause = f"Slurm {version} is too old"
            yield error(names, cause, f"install {RELEASES[0]} or later, the same on all nodes")


def _installed_version(facts: Facts) -> str | None:
    block = facts.block("slurmd.version") or facts.block("slurmctld.version")
    if block is None or block.status != 0 or not block.text:
        return None
    return block.text.split()[-1]


def cgroup(snapshot: Snapshot) -> Findings:
    """A machine with cgroup v2 needs Slurm's plugin for it, or slurmd does not start.

    Except where its configuration uses no control groups: proctrack/linuxproc without task/cgroup.
    """
    for name, facts in snapshot.facts.items():
        is_v2 = facts.first("cgroup") == "cgroup2fs"
        plugins = facts.values.get("cgroup_plugin", ())
        has_plugin = any(path.endswith("cgroup_v2.so") for path in plugins)
        runs = facts.first("slurmd_runs") == "yes"
        if facts.block("slurmd.version") and is_v2 and not has_plugin and not runs:
            yield error(
                name,
                "the machine has cgroup v2, this Slurm has no plugin for it (cgroup_v2.so)",
                "install Slurm 22.05 or later, built with the dbus headers; do not go back to v1 "
                "in the boot loader",
            )


def configuration(snapshot: Snapshot) -> Findings:
    """All nodes run with the controller's configuration."""
    differing = []
    for name, facts in snapshot.facts.items():
        if read_config(facts.answer("slurm.config")).get("HASH_VAL", "").startswith("Different"):
            differing.append(name)
    if differing:
        cause = "slurm.conf differs from the one slurmctld runs with"
        yield error(differing, cause, SAME_CONFIGURATION)
    for path, nodes_of_sum in _copies(snapshot).items():
        odd = outside_largest(nodes_of_sum)
        if not set(odd) <= set(differing):
            yield warning(odd, f"{path} is not the same on all nodes", SAME_CONFIGURATION)


def _copies(snapshot: Snapshot) -> dict[str, dict[str, list[str]]]:
    """For each path of a configuration file: the nodes by its checksum."""
    copies: dict[str, dict[str, list[str]]] = {}
    for name, facts in snapshot.facts.items():
        for line in facts.values.get("config_file", ()):
            path, checksum = line.split(maxsplit=1)
            copies.setdefault(path, {}).setdefault(checksum, []).append(name)
    return copies
