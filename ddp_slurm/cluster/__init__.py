"""The machines: cluster.yaml read, written, and discovered from a live Slurm."""

from ddp_slurm.cluster.machines import Cluster, ClusterError, GpuModel, HostlistError, Node, Ssh

__all__ = ["Cluster", "ClusterError", "GpuModel", "HostlistError", "Node", "Ssh"]
