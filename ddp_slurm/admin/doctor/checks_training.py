"""Checks of what trains: Python, torch and its libraries on all nodes, and whether torch still serves each card."""

import re
from collections.abc import Mapping

from ddp_slurm.admin.doctor.finding import Findings, Severity
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Facts

OLDEST_LIBC_OF_TORCH_2_7 = (2, 28)
_WHAT = {
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
}


def versions(snapshot: Snapshot) -> Findings:
    """Python's minor release, torch, CUDA, cuDNN and NCCL are the same on all nodes with GPUs."""
    told = {n: f.training for n, f in _with_gpus(snapshot).items() if f.training}
    if not told:
        yield Severity.SKIPPED, (), f"{snapshot.python} runs on no node with GPUs", ""
    for key, what in _WHAT.items():
        groups = _groups(
            {name: values | {"python": _minor(values["python"])} for name, values in told.items()},
            key,
        )
        if len(groups) > 1:
            odd = min(groups.values(), key=len)
            listed = ", ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
            yield (
                Severity.ERROR,
                tuple(odd),
                f"different {what}: {listed}",
                "the same environment on all nodes (see the guide)",
            )


def importable(snapshot: Snapshot) -> Findings:
    """The interpreter and torch are there on every node with GPUs."""
    nodes = _with_gpus(snapshot)
    missing = tuple(name for name, facts in nodes.items() if not facts.training)
    if missing and len(missing) == len(nodes):
        yield (
            Severity.WARNING,
            missing,
            f"{snapshot.python} does not run",
            "name the interpreter that trains: --python",
        )
    elif missing:
        yield (
            Severity.ERROR,
            missing,
            f"{snapshot.python} does not run",
            "the same environment on all nodes, under the same path",
        )
    faults = _groups({name: facts.training for name, facts in nodes.items()}, "torch_fault")
    for fault, names in faults.items():
        everywhere = len(names) == len(nodes)
        yield (
            Severity.WARNING if everywhere else Severity.ERROR,
            tuple(names),
            f"import torch: {fault}",
            f"name the interpreter that trains: --python (now {snapshot.python})"
            if everywhere
            else "install it there too: the same environment on all nodes",
        )


def driver_branch(snapshot: Snapshot) -> Findings:
    """The GPU drivers are of one branch: NCCL meets its own faults between two."""
    cards = {
        n: f.gpus[0] for n, f in snapshot.facts.items() if f.gpus and f.gpus[0].vendor == "nvidia"
    }
    groups = _groups(
        {n: {"branch": card.driver.split(".")[0]} for n, card in cards.items() if card.driver},
        "branch",
    )
    if len(groups) > 1:
        odd = min(groups.values(), key=len)
        listed = ", ".join(f"{branch} on {', '.join(names)}" for branch, names in groups.items())
        yield (
            Severity.WARNING,
            tuple(odd),
            f"different driver branches: {listed}",
            "one branch on all nodes, held",
        )


def served_cards(snapshot: Snapshot) -> Findings:
    """torch's build holds code for each card.

    Code for compute capability X.y runs on X.z with z >= y; code for compute_XY (PTX) on everything later.
    Source: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    for name, facts in snapshot.facts.items():
        built = facts.training.get("architectures", "").split()
        if not built:
            continue
        nvidia = [gpu for gpu in facts.gpus if gpu.vendor == "nvidia" and gpu.compute_capability]
        cards = {gpu.name: gpu.compute_capability for gpu in nvidia}
        for card, capability in cards.items():
            if not is_served(capability, built):
                cause = f"{card} (compute {capability}) is not served by torch {facts.training.get('torch')}"
                yield Severity.ERROR, (name,), cause, _wheel(capability)


def is_served(capability: str, built: list[str]) -> bool:
    """Whether a build with code for ``built`` runs on a card.

    >>> is_served("6.1", ["sm_60", "sm_70"]), is_served("8.9", ["sm_90"]), is_served("12.0", ["sm_80", "compute_90"])
    (True, False, True)
    """
    major, minor = (int(part) for part in capability.split("."))
    for word in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", word)
        if not match:
            continue
        code = (int(match[2]), int(match[3]))
        if match[1] == "compute" and code <= (major, minor):
            return True
        if match[1] == "sm" and code[0] == major and code[1] <= minor:
            return True
    return False


def _wheel(capability: str) -> str:
    major = int(capability.split(".")[0])
    if major < 5:
        return "no torch of today serves it: leave the card out of cluster.yaml"
    if major <= 7:
        return "the cu126 wheels still serve it; the same wheels on all nodes"
    return "take wheels of a later CUDA (cu128 and up), the same on all nodes"


def libc(snapshot: Snapshot) -> Findings:
    """torch wheels from 2.7 on need glibc 2.28, which Ubuntu 18.04 does not have."""
    for name, facts in _with_gpus(snapshot).items():
        match = re.search(r"glibc (\d+)\.(\d+)", facts.first("libc") or "")
        if match and (int(match[1]), int(match[2])) < OLDEST_LIBC_OF_TORCH_2_7:
            yield (
                Severity.WARNING,
                (name,),
                f"{facts.first('os')} has {match[0]}; torch wheels from 2.7 on need 2.28",
                "torch 2.6 on all nodes, or a newer release of the system on this one",
            )


def _with_gpus(snapshot: Snapshot) -> dict[str, Facts]:
    return {
        node.name: snapshot.facts[node.name]
        for node in snapshot.cluster.nodes
        if node.gpus and node.name in snapshot.facts
    }


def _groups(told: Mapping[str, Mapping[str, str]], key: str) -> dict[str, list[str]]:
    """Nodes by their value of ``key``; those without one are left out."""
    groups: dict[str, list[str]] = {}
    for name, values in told.items():
        if key in values:
            groups.setdefault(values[key], []).append(name)
    return groups


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
