"""The variables that the steps get."""

import base64
import secrets
import socket
from importlib import resources
from ipaddress import ip_address

from ddp_slurm.admin.configs import render_configs
from ddp_slurm.admin.install.before import NodeBefore
from ddp_slurm.admin.install.first_job import first_job
from ddp_slurm.admin.install.steps import InstallError
from ddp_slurm.cluster import Cluster, Node

MUNGE_KEY_BYTES = 1024
HEALTH_CHECK = "/usr/local/sbin/gpu_check.sh"
"""Where the step slurmd puts cluster_setup/gpu_check.sh on every node."""

DEFAULT_MUNGE_ID = 64031
DEFAULT_SLURM_ID = 64030
"""User ids where no node has the users yet; Debian's packages choose 64030 for slurm too."""


def common_settings(cluster: Cluster, *, dry_run: bool) -> dict[str, str]:
    """Those that can be known before any node is asked. Raises InstallError."""
    addresses = {node.name: _address(node) for node in cluster.nodes}
    lines = [f"{name} {address}" for name, address in addresses.items()]
    return {
        "NODES": "\n".join(lines),
        "CONTROLLER": cluster.controller_name,
        "CONTROLLER_ADDRESS": addresses[cluster.controller_name],
        "DRY_RUN": "yes" if dry_run else "no",
    }


def _address(node: Node) -> str:
    """A node's address for /etc/hosts, looked up where cluster.yaml has only its name."""
    name = node.address or node.name
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise InstallError(
            f"node {node.name!r}: {name!r} has no address here; add 'address:' in cluster.yaml"
        ) from None
    # Of both kinds IPv4: Slurm uses IPv6 only where cluster.yaml has such an address
    ipv4_answers = [answer for answer in answers if answer[0] == socket.AF_INET]
    best = (ipv4_answers or answers)[0]
    address = str(best[4][0])
    if ip_address(address.split("%")[0]).is_loopback:
        raise InstallError(
            f"node {node.name!r}: {name!r} is {address} here, where no other node reaches it; "
            "add 'address:' in cluster.yaml"
        )
    return address


def settings_of_controller(controller: NodeBefore) -> dict[str, str]:
    """Ids and key: a running cluster keeps its own."""
    new_key = base64.b64encode(secrets.token_bytes(MUNGE_KEY_BYTES)).decode()
    return {
        "MUNGE_UID": controller.munge_uid or str(DEFAULT_MUNGE_ID),
        "SLURM_UID": controller.slurm_uid or str(DEFAULT_SLURM_ID),
        "MUNGE_KEY": controller.munge_key or new_key,
    }


def settings_of_release(
    cluster: Cluster, release: str, python: str | None, *, control_groups: bool
) -> dict[str, str]:
    """The files' texts and the first job, which trains with ``python`` where it is given."""
    files = render_configs(
        cluster,
        slurm_version=release,
        health_check=HEALTH_CHECK,
        control_groups=control_groups,
    )
    gpu_check = resources.files("ddp_slurm.cluster_setup").joinpath("gpu_check.sh")
    srun, tasks = first_job(cluster, python)
    return {
        "SLURM_CONF": files["slurm.conf"],
        "GRES_CONF": files["gres.conf"],
        "CGROUP_CONF": files["cgroup.conf"],
        "GPU_CHECK": gpu_check.read_text(encoding="utf-8"),
        "SRUN": srun,
        "TASKS": str(tasks),
    }
