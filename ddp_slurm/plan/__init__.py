"""Who runs where: from a cluster and the job options to a plan with a place and a share for every rank."""

from ddp_slurm.plan.plan import Component, Plan, PlanError, PlannedRank, make_plan

__all__ = ["Component", "Plan", "PlanError", "PlannedRank", "make_plan"]
