"""The cluster for those who go on with Ansible."""

import yaml

from ddp_slurm.cluster import Cluster


def ansible_inventory(cluster: Cluster) -> str:
    """The nodes as an Ansible inventory in YAML: groups slurm_controller, slurm_nodes and gpu_nodes, how to reach them.

    Source of the names: Ansible's user guide, "How to build your inventory".
    """
    hosts = {}
    for node in cluster.nodes:
        about: dict[str, object] = {"ansible_host": node.address or node.name}
        if node.ssh.user:
            about["ansible_user"] = node.ssh.user
        if node.ssh.port:
            about["ansible_port"] = node.ssh.port
        if node.ssh.identity:
            about["ansible_ssh_private_key_file"] = node.ssh.identity
        known = {
            "slurm_gres": node.gres,
            "slurm_cpus": node.cpus,
            "slurm_memory_mb": node.memory_mb,
        }
        hosts[node.name] = about | {key: value for key, value in known.items() if value}
    groups: dict[str, dict[str, dict[str, dict[str, object]]]] = {
        "slurm_controller": {"hosts": {cluster.controller_name: {}}},
        "slurm_nodes": {"hosts": {node.name: {} for node in cluster.nodes}},
        "gpu_nodes": {"hosts": {node.name: {} for node in cluster.nodes if node.gpus}},
    }
    text: str = yaml.safe_dump(
        {"all": {"vars": {"slurm_cluster_name": cluster.name}, "hosts": hosts, "children": groups}},
        sort_keys=False,
    )
    return text
