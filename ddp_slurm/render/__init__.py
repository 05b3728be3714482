"""A plan as text: the sbatch script, or one torchrun command for each node."""

from ddp_slurm.render.sbatch import RenderError, render_sbatch

__all__ = ["RenderError", "render_sbatch"]
