"""The configuration of a lab's Slurm: the one that users' machines get, in the lab's folders."""

import os
import re
import stat
from dataclasses import replace

from ddp_slurm.admin.configs import render_configs, write_configs
from ddp_slurm.admin.installation import Installation
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.lab.layout import LabLayout

CPUS_PER_GPU = 8
MEMORY_MB_PER_GPU = 16384
NULL_DEVICE = os.makedev(1, 3)


def write_configuration(lab: LabLayout, cluster: Cluster, slurm_version: str) -> None:
    """Write slurm.conf and its companions, and make the device files that they name."""
    installation = Installation(
        state_dir=str(lab.folder / "state"),
        spool_dir=str(lab.folder / "spool" / "%n"),
        log_dir=str(lab.log_folder),
        run_dir=str(lab.folder / "state"),
        munge_socket=str(lab.folder / "munge" / "socket"),
        controller=lab.controller,
        controller_address=lab.controller_address,
        addresses={node.name: node.address for node in lab.nodes},
        gpu_device_prefix=str(lab.folder / "dev" / "nvidia"),
        scheduler_parameters=("bf_interval=1", "sched_interval=2"),
        is_lab=True,
    )
    described = replace(cluster, nodes=tuple(_with_defaults(node) for node in cluster.nodes))
    files = render_configs(described, slurm_version=slurm_version, installation=installation)
    write_configs(files, lab.slurm_conf.parent)
    _make_gpu_devices(files["gres.conf"])


def _with_defaults(node: Node) -> Node:
    """The node with some CPUs and memory for each GPU where its description has none."""
    gpus = max(1, node.gpu_count)
    cpus = node.cpus
    if not cpus and not node.cores_per_socket:
        cpus = CPUS_PER_GPU * gpus
    return node._replace(cpus=cpus, memory_mb=node.memory_mb or MEMORY_MB_PER_GPU * gpus)


def _make_gpu_devices(gres_conf: str) -> None:
    """Slurm wants character devices, which it does not open: these are copies of /dev/null."""
    for files in re.findall(r"\bFile=(\S+)", gres_conf):
        for path in expand_hostlist(files):
            if not os.path.exists(path):
                os.mknod(path, stat.S_IFCHR | 0o666, NULL_DEVICE)
