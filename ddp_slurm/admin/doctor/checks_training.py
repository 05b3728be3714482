"""Checks of what trains: Python, torch and its libraries, and whether torch supports each card."""

import re
from collections.abc import Mapping

from ddp_slurm.admin.advise import (
    OLDEST_DRIVER_OF_CUDA,
    OLDEST_GLIBC_OF_TORCH_2_7,
    OLDEST_PYTHON,
    torch_command,
)
from ddp_slurm.admin.doctor.finding import Findings, disagreement, error, skipped, warning, well
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Facts

SAME_ENVIRONMENT = "the same environment on all nodes (see the guide)"
_COMPARED = {
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "ddp_slurm": "ddp_slurm",
}


def importable(snapshot: Snapshot) -> Findings:
    """A Python that is new enough, torch and ddp_slurm exist on every node with GPUs."""
    nodes = _with_gpus(snapshot)
    yield from _too_old_or_incomplete(snapshot.python, nodes)
    name_it = f"name the interpreter that trains: --python (now {snapshot.python})"
    missing = [name for name, facts in nodes.items() if not facts.training]
    if missing:
        cause = f"{snapshot.python} does not run"
        if len(missing) == len(nodes):
            yield warning(missing, cause, name_it)
        else:
            fix = "the same environment on all nodes, under the same path"
            yield error(missing, cause, fix)
    training = {name: facts.training for name, facts in nodes.items()}
    for failure, names in _groups(training, "torch_error").items():
        cause = f"import torch: {failure}"
        if len(names) == len(nodes):
            yield warning(names, cause, name_it)
        else:
            fix = "install it there too: the same environment on all nodes"
            yield error(names, cause, fix)


def _too_old_or_incomplete(python: str, nodes: Mapping[str, Facts]) -> Findings:
    old = []
    without_package = []
    for name, facts in nodes.items():
        version = facts.training.get("python", "")
        if version and _minor(version) < OLDEST_PYTHON:
            old.append(name)
        elif facts.training.get("ddp_slurm") == "none":
            without_package.append(name)
    if old:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        version = nodes[old[0]].training["python"]
        fix = "a newer Python, or conda, on all nodes (see the guide)"
        yield error(old, f"{python} is Python {version}; ddp_slurm needs {oldest}", fix)
    if without_package:
        fix = f"{python} -m pip install '.[train]' in the package's folder, on all nodes"
        yield warning(without_package, f"{python} does not have ddp_slurm", fix)


def _minor(version: str) -> tuple[int, ...]:
    """``(3, 11)`` of ``3.11.4``."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def cuda(snapshot: Snapshot) -> Findings:
    """torch is built for GPUs, and for a CUDA that the driver supports."""
    for_cpus = []
    too_new: dict[str, list[str]] = {}
    for name, facts in _with_gpus(snapshot).items():
        version = facts.training.get("cuda", "")
        drivers = [gpu.driver for gpu in facts.gpus if gpu.vendor == "nvidia"]
        if version == "none":
            for_cpus.append(name)
        elif drivers and not _supports(drivers[0], version):
            oldest = OLDEST_DRIVER_OF_CUDA[_major(version)]
            cause = f"CUDA {version} needs driver {oldest} or later, {drivers[0]} is installed"
            too_new.setdefault(cause, []).append(name)
    for cause, names in too_new.items():
        fix = f"a newer driver, or on all nodes: {_wheel(snapshot)}"
        yield error(names, f"torch's {cause}", fix)
    if for_cpus:
        fix = f"on all nodes: {_wheel(snapshot)}"
        yield error(for_cpus, f"{snapshot.python} has a torch for CPUs only", fix)


def _wheel(snapshot: Snapshot) -> str:
    """The line for pip that serves every card under the oldest driver, or why there is none."""
    nvidia = [
        gpu for facts in snapshot.facts.values() for gpu in facts.gpus if gpu.vendor == "nvidia"
    ]
    branches = [int(_major(gpu.driver)) for gpu in nvidia if _major(gpu.driver or "").isdecimal()]
    cards = []
    for gpu in nvidia:
        if gpu.compute_capability:
            major, minor = gpu.compute_capability.split(".")
            cards.append((int(major), int(minor)))
    if not cards:
        return "ddp-slurm cluster advise prints the line for pip"
    command, problem = torch_command(cards, min(branches, default=None))
    in_python = f"{snapshot.python} -m pip install --force-reinstall"
    return problem or command.replace("pip install", in_python)


def _supports(driver: str, cuda_version: str) -> bool:
    branch = _major(driver)
    oldest = OLDEST_DRIVER_OF_CUDA.get(_major(cuda_version))
    return oldest is None or not branch.isdecimal() or int(branch) >= oldest


def _major(version: str) -> str:
    return version.split(".")[0]


def versions(snapshot: Snapshot) -> Findings:
    """Python's minor release, torch, CUDA, cuDNN and NCCL are the same on all nodes with GPUs."""
    values_of_node: dict[str, dict[str, str]] = {}
    for name, facts in _with_gpus(snapshot).items():
        if facts.training:
            python = ".".join(map(str, _minor(facts.training["python"])))
            values_of_node[name] = {**facts.training, "python": python}
    if not values_of_node:
        yield skipped(f"{snapshot.python} runs on no node with GPUs")
    for key, title in _COMPARED.items():
        groups = _groups(values_of_node, key)
        yield from disagreement(error, title, groups, SAME_ENVIRONMENT)


def driver_branch(snapshot: Snapshot) -> Findings:
    """The GPU drivers are of one branch: NCCL has errors of its own between two."""
    nodes_of_branch: dict[str, list[str]] = {}
    for name, facts in snapshot.facts.items():
        if facts.gpus and facts.gpus[0].vendor == "nvidia" and facts.gpus[0].driver:
            nodes_of_branch.setdefault(_major(facts.gpus[0].driver), []).append(name)
    fix = "one branch on all nodes, excluded from automatic upgrades"
    yield from disagreement(warning, "driver branches", nodes_of_branch, fix)


def served_cards(snapshot: Snapshot) -> Findings:
    """torch's build has code for each card."""
    for name, facts in snapshot.facts.items():
        built = facts.training.get("architectures", "").split()
        if not built:
            continue
        capabilities = {}
        for gpu in facts.gpus:
            if gpu.vendor == "nvidia" and gpu.compute_capability:
                capabilities[gpu.name] = gpu.compute_capability
        for card, capability in capabilities.items():
            if not is_served(capability, built):
                torch = facts.training.get("torch")
                cause = f"torch {torch} has no code for {card} (compute capability {capability})"
                yield error(name, cause, f"on all nodes: {_wheel(snapshot)}")


def is_served(capability: str, built: list[str]) -> bool:
    """Whether a build with code for ``built`` runs on a card.

    Code for compute capability X.y runs on X.z with z >= y; code for compute_XY (PTX) on everything
    later. Source: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".

    >>> is_served("6.1", ["sm_60"]), is_served("8.9", ["sm_90"]), is_served("12.0", ["compute_90"])
    (True, False, True)
    """
    major, minor = (int(part) for part in capability.split("."))
    for architecture in built:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture)
        if not match:
            continue
        code = (int(match[2]), int(match[3]))
        if match[1] == "compute" and code <= (major, minor):
            return True
        if match[1] == "sm" and code[0] == major and code[1] <= minor:
            return True
    return False


def cards_compute(snapshot: Snapshot) -> Findings:
    """torch finds every card of a node, and each computes.

    A card that a job fills or holds exclusively is not an error: it works.
    """
    for node, facts in snapshot.responding():
        has_torch_for_gpus = facts.training.get("cuda", "none") != "none"
        if not (node.gpus and has_torch_for_gpus and "cards" in facts.training):
            continue
        name, planned = node.name, node.gpu_count
        failures = facts.training.get("card_errors", "")
        found = int(facts.training["cards"])
        if re.search(r"out of memory|busy or unavailable", failures):
            yield skipped(f"in use: {failures}", name)
        elif re.search(r"driver.*too old", failures):
            yield error(name, f"torch: {failures}", f"a newer driver, or {_wheel(snapshot)}")
        elif failures:
            yield error(name, f"torch: {failures}", _FIX_OF_CARD)
        elif found < planned:
            cause = f"torch finds {found} of {planned} GPUs"
            yield error(name, cause, f"CUDA_VISIBLE_DEVICES in its shell; {_FIX_OF_CARD}")


_FIX_OF_CARD = (
    "on it: nvidia-smi; nvidia-modprobe -u -c=0 makes missing device files; dmesg shows a broken "
    "card"
)


def all_reduce(snapshot: Snapshot) -> Findings:
    """One step over all nodes: every rank's card computes, and all ranks reduce together."""
    proof = snapshot.proof
    if proof is None:
        yield skipped("not run; ddp-slurm doctor --via srun runs it")
        return
    lines = proof.out.splitlines()
    measured = next((line for line in lines if line.startswith("all-reduce")), "")
    if proof.status == 0 and measured:
        yield well(tuple(snapshot.facts), measured.removeprefix("all-reduce "))
        return
    ranks = [line for line in lines if line.startswith("rank ") and not line.endswith("computes")]
    messages = [line for line in proof.err.splitlines() if "error" in line.lower()]
    causes = ranks or messages or proof.err.splitlines() or ["no rank started"]
    text = "; ".join(dict.fromkeys([*causes[:4], *([measured] if measured else [])]))
    yield error((), text, "the checks above; interface: in cluster.yaml; the MTU")


def libc(snapshot: Snapshot) -> Findings:
    """torch wheels from 2.7 on need glibc 2.28, which Ubuntu 18.04 does not have."""
    for name, facts in _with_gpus(snapshot).items():
        match = re.search(r"glibc (\d+)\.(\d+)", facts.first("libc") or "")
        if match and (int(match[1]), int(match[2])) < OLDEST_GLIBC_OF_TORCH_2_7:
            yield warning(
                name,
                f"{facts.first('os')} has {match[0]}; torch wheels from 2.7 on need 2.28",
                "torch 2.6 on all nodes, or a newer release of the system on this one",
            )


def _with_gpus(snapshot: Snapshot) -> dict[str, Facts]:
    return {node.name: facts for node, facts in snapshot.responding() if node.gpus}


def _groups(values_of_node: Mapping[str, Mapping[str, str]], key: str) -> dict[str, list[str]]:
    """Nodes by their value of ``key``; those without one are left out."""
    groups: dict[str, list[str]] = {}
    for name, values in values_of_node.items():
        if key in values:
            groups.setdefault(values[key], []).append(name)
    return groups
