"""Checks of what a job asks Slurm for: partitions, types of GPUs, reservations."""

from ddp_slurm.admin.doctor.finding import Findings, error, warning
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.slurm_client.records import state_words

INSTALL = "ddp-slurm cluster install --step slurmctld --step slurmd"
FIX = f"correct cluster.yaml; or {INSTALL} writes slurm.conf"


def partitions(snapshot: Snapshot) -> Findings:
    """The partitions of cluster.yaml exist, have their nodes, and are up."""
    known = snapshot.slurm_partitions
    for partition in known.values():
        if partition.state != "UP":
            nodes = [
                n.name for n in snapshot.slurm_nodes.values() if partition.name in n.partitions
            ]
            cause = f"partition {partition.name} is {partition.state}: its jobs wait"
            yield warning(nodes, cause, f"scontrol update partition={partition.name} state=up")
    for node in snapshot.cluster.nodes:
        seen = snapshot.slurm_nodes.get(node.name)
        if seen is None or not node.partition or not known:
            continue
        if node.partition not in known:
            cause = f"partition {node.partition!r} of cluster.yaml is not in Slurm"
            yield error(node.name, f"{cause}; it has {', '.join(known)}", FIX)
        elif node.partition not in seen.partitions:
            cause = f"not in partition {node.partition!r} as cluster.yaml has it"
            yield error(node.name, f"{cause}, but in {', '.join(seen.partitions)}", FIX)


def gpu_types(snapshot: Snapshot) -> Findings:
    """The types of GPUs in cluster.yaml are those of slurm.conf: a job for another one waits."""
    for node in snapshot.cluster.nodes:
        seen = snapshot.slurm_nodes.get(node.name)
        if seen is None:
            continue
        known = {gres.type for gres in seen.gres if gres.name == "gpu" and gres.type}
        for model in node.gpus:
            if model.type and known and model.type not in known:
                cause = (
                    f"cluster.yaml has GPUs of type {model.type!r}, slurm.conf of "
                    f"{', '.join(sorted(known))}"
                )
                yield error(node.name, cause, f"the same type in both; {INSTALL} writes slurm.conf")


def reservations(snapshot: Snapshot) -> Findings:
    """No reservation keeps a node from everybody's jobs."""
    for name, record in snapshot.slurm_nodes.items():
        if "RESERVED" in state_words(record.state):
            fix = "scontrol show reservation; scontrol delete reservationname=NAME"
            yield warning(name, f"{record.state}: only jobs of a reservation start here", fix)
