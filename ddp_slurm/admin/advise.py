"""``ddp-slurm cluster advise``: driver, torch's wheel, Python and Slurm for these machines. Pure.

They are one question: the oldest card and the oldest system of all nodes decide. Sources: the
package archives of the systems; the support matrix of torch's wheels, github.com/pytorch/pytorch
issues 157517 and 172352 (cards) and pull request 141565 (glibc); NVIDIA, CUDA Compatibility,
section "Minor Version Compatibility" (drivers).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ddp_slurm.admin.slurm_releases import FIRST_WITH_CGROUP_V2, RELEASES
from ddp_slurm.cluster import Cluster, Node

Capability = tuple[int, int]
FIRST_SERVED, VOLTA, TURING, HOPPER, BLACKWELL = (5, 0), (7, 0), (7, 5), (9, 0), (10, 0)
OLDEST_PYTHON = (3, 10)
OLDEST_GLIBC_OF_TORCH_2_7 = (2, 28)
OLDEST_DRIVER_OF_CUDA = {"11": 450, "12": 525, "13": 580}
"""Driver branch by CUDA's major release."""
OLDEST_DRIVER_OF_BLACKWELL = 570
LAST_BRANCH = ((FIRST_SERVED, 470), (TURING, 580))
"""The last driver branch of the cards below a capability: Kepler; Maxwell, Pascal and Volta."""
INDEX = "https://download.pytorch.org/whl/"


class System(NamedTuple):
    """What a distribution has."""

    newest_driver: int | None
    """The newest branch of NVIDIA's driver in its archive; None where it has none."""
    python: Capability
    glibc: Capability
    slurm: str


SYSTEMS = {
    "ubuntu-18.04": System(525, (3, 6), (2, 27), "17.11"),
    "ubuntu-20.04": System(570, (3, 8), (2, 31), "19.05"),
    "ubuntu-22.04": System(590, (3, 10), (2, 35), "21.08"),
    "ubuntu-24.04": System(590, (3, 12), (2, 39), "23.11"),
    "debian-12": System(None, (3, 11), (2, 36), "22.05"),
    "debian-13": System(None, (3, 13), (2, 41), "24.11"),
}


class Line(NamedTuple):
    """One line of the advice."""

    subject: str
    choice: str
    reason: str
    is_problem: bool = False


def advise(cluster: Cluster) -> list[Line]:
    """Driver, torch, Python and Slurm for all nodes of a cluster, each with the reason."""
    systems = {node.os: SYSTEMS[node.os] for node in cluster.nodes if node.os in SYSTEMS}
    lines = []
    for node in cluster.nodes:
        if node.os not in SYSTEMS:
            choice = f"unknown system {node.os or 'none'}: not considered"
            reason = "ddp-slurm cluster probe writes os:; known are " + ", ".join(SYSTEMS)
            lines.append(Line(node.name, choice, reason, is_problem=True))
    cards = {node.name: capabilities(node) for node in cluster.nodes if node.gpus}
    for name, found in cards.items():
        if not found:
            reason = "probe again with the driver installed: nvidia-smi reports it from 510 on"
            lines.append(Line(name, "compute capability unknown", reason, is_problem=True))
    found = [card for node_cards in cards.values() for card in node_cards]
    if found:
        lines += _driver_and_torch(found, systems)
    if systems:
        lines += [_python(systems), _slurm(systems)]
    return lines


def capabilities(node: Node) -> list[Capability]:
    """The compute capabilities of a node's NVIDIA cards, from features such as ``cc86``."""
    matches = (re.fullmatch(r"cc(\d+)(\d)", feature) for feature in node.features)
    return [(int(match[1]), int(match[2])) for match in matches if match]


def _driver_and_torch(cards: list[Capability], systems: Mapping[str, System]) -> list[Line]:
    branch = newest_branch(cards, systems.values())
    oldest, newest = min(cards), max(cards)
    limits = [f"oldest card {_dotted(oldest)}", f"newest {_dotted(newest)}"]
    limits += [f"{name} has {system.newest_driver}" for name, system in systems.items()]
    why = ", ".join(limit for limit in limits if "None" not in limit)
    driver = f"branch {branch} on all nodes" if branch else "the newest branch, one on all nodes"
    glibc = min((system.glibc for system in systems.values()), default=OLDEST_GLIBC_OF_TORCH_2_7)
    command, problem = torch_command(cards, branch, glibc)
    torch = Line("torch", command or problem, why, is_problem=bool(problem))
    return [Line("driver", driver, why), torch]


def _dotted(version: Capability) -> str:
    return f"{version[0]}.{version[1]}"


def newest_branch(cards: Sequence[Capability], systems: Iterable[System]) -> int | None:
    """The newest driver branch for these cards that all systems have; None: no limit is known."""
    limits = [system.newest_driver for system in systems if system.newest_driver]
    limits += [branch for capability, branch in LAST_BRANCH if min(cards) < capability]
    return min(limits, default=None)


def torch_command(
    cards: Sequence[Capability], branch: int | None, glibc: Capability = OLDEST_GLIBC_OF_TORCH_2_7
) -> tuple[str, str]:
    """The line for pip whose wheels serve all the cards under a driver branch, or the problem.

    ``branch`` None: no limit. One of the two texts is empty.
    """
    oldest, newest = min(cards), max(cards)
    if oldest < FIRST_SERVED:
        return "", f"no current torch serves compute capability {_dotted(oldest)}: leave it out"
    if newest >= BLACKWELL and branch and branch < OLDEST_DRIVER_OF_BLACKWELL:
        return "", f"Blackwell needs driver {OLDEST_DRIVER_OF_BLACKWELL}: a newer system"
    if newest >= BLACKWELL and oldest < VOLTA:
        return "", "no wheel serves Blackwell and Maxwell or Pascal: two clusters"
    if glibc < OLDEST_GLIBC_OF_TORCH_2_7:
        if newest >= BLACKWELL:
            return "", f"glibc {_dotted(glibc)} stops at torch 2.6, which has no Blackwell"
        return _pip("'torch<2.7'", "cu124"), ""
    if oldest >= TURING:
        needs_older_cuda = branch is not None and branch < OLDEST_DRIVER_OF_CUDA["13"]
        return _pip("torch", "cu128" if needs_older_cuda else ""), ""
    if newest >= BLACKWELL:
        return _pip("'torch==2.8.*'", "cu128"), ""
    # From 2.11 on the build for CUDA 12.6 may lack Hopper.
    return _pip("'torch<2.11'" if newest >= HOPPER else "torch", "cu126"), ""


def _pip(torch: str, index: str) -> str:
    command = f"pip install {torch} torchvision"
    return f"{command} --index-url {INDEX}{index}" if index else command


def _python(systems: Mapping[str, System]) -> Line:
    releases = {system.python for system in systems.values()}
    listed = ", ".join(f"{name} has {_dotted(system.python)}" for name, system in systems.items())
    if min(releases) < OLDEST_PYTHON or len(releases) > 1:
        return Line("Python", "conda create -y -n ddp python=3.11, on all nodes", listed)
    return Line("Python", "python3 -m venv, on all nodes", listed)


def _slurm(systems: Mapping[str, System]) -> Line:
    releases = {system.slurm for system in systems.values()}
    listed = ", ".join(f"{name} has {system.slurm}" for name, system in systems.items())
    if len(releases) > 1:
        choice = "packages of your own, one release on all nodes; or the same system on all"
    elif min(releases) < RELEASES[0]:
        choice = "packages of your own, or a newer system on all nodes"
    elif min(releases) < FIRST_WITH_CGROUP_V2:
        choice = "the distribution's packages, without limits on a job's memory and GPUs"
    else:
        choice = "the distribution's packages"
    return Line("Slurm", choice, listed)
