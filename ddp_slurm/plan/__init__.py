"""Who runs where: from a cluster and options to a place and a share for every rank."""

from ddp_slurm.plan.plan import Component, Plan, PlanError, PlannedRank
from ddp_slurm.plan.planner import make_plan

__all__ = ["Component", "Plan", "PlanError", "PlannedRank", "make_plan"]
