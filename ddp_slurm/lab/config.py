"""The configuration of a lab's Slurm."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ..cluster import Cluster, Node

if TYPE_CHECKING:
    from .lab import Lab


def with_defaults(node: Node) -> Node:
    """A description without CPUs or memory is enough for a lab: 4 CPUs and 16 GiB a GPU."""
    share = max(1, node.gpu_count)
    return replace(node, cpus=node.cpus or 4 * share, memory_mb=node.memory_mb or 16384 * share)


def write_configuration(lab: "Lab", cluster: Cluster, version: str) -> None:
    release = tuple(int(part) for part in version.split(".")[:2])
    nodes = [with_defaults(node) for node in cluster.nodes]
    types = sorted({g.split(":")[0] for node in nodes for g in node.gres.split(",") if g})
    lines = [
        f"ClusterName={cluster.name}",
        f"SlurmctldHost={lab.controller}({lab.controller_address})",
        f"AuthInfo=socket={lab.folder}/munge/socket,cred_expire=10",
        "SlurmUser=root",
        "SlurmctldPort=6817",
        "SlurmdPort=6818",
        f"StateSaveLocation={lab.folder}/state",
        f"SlurmdSpoolDir={lab.folder}/spool/%n",
        f"SlurmctldPidFile={lab.folder}/slurmctld.pid",
        f"SlurmdPidFile={lab.folder}/spool/%n.pid",
        f"SlurmctldLogFile={lab.folder}/log/slurmctld.log",
        f"SlurmdLogFile={lab.folder}/log/slurmd.%n.log",
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdTimeout=20",
        "KillWait=5",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=2,bf_hetjob_immediate,whole_hetjob",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"GresTypes={','.join(types)}",
    ]
    gres = []
    for node, host in zip(nodes, lab.nodes, strict=True):
        lines.append(
            f"NodeName={node.name} NodeAddr={host.address} CPUs={node.cpus} RealMemory={node.memory_mb} "
            + (f"Gres={node.gres} " if node.gres else "")
            + "State=UNKNOWN"
        )
        first = 0
        for model in node.gpus:
            last = first + model.count - 1
            files = f"nvidia[{first}-{last}]" if model.count > 1 else f"nvidia{first}"
            kind = f"Type={model.type} " if model.type else ""
            gres.append(f"NodeName={node.name} Name=gpu {kind}File={lab.folder}/dev/{node.name}/{files}")
            first = last + 1
    lines.append(f"PartitionName=all Nodes={','.join(n.name for n in nodes)} Default=YES MaxTime=INFINITE State=UP")
    (lab.folder / "conf/slurm.conf").write_text("\n".join(lines) + "\n")
    (lab.folder / "conf/gres.conf").write_text("\n".join(gres) + "\n")
    if release >= (21, 8):
        plugin = "disabled" if release >= (24, 5) else "cgroup/v1"
        (lab.folder / "conf/cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
