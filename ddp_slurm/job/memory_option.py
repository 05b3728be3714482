"""``--memory SIZE``, ``SIZE/cpu`` or ``none``: the one memory option that sbatch gets."""

from dataclasses import dataclass
from typing import Any

from ddp_slurm.schema.fields import memory_mb, memory_text, plain_text

PER_CPU = "/cpu"


@dataclass(frozen=True)
class Memory:
    """The value of --memory. Slurm accepts one of --mem and --mem-per-cpu; sites may demand one."""

    mb: int | None
    """MiB; None leaves the memory to Slurm."""
    per_cpu: bool = False
    """``mb`` is for each CPU (--mem-per-cpu), not for each node (--mem)."""

    @classmethod
    def read(cls, value: Any) -> "Memory":
        """Raises ValueError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            return cls(memory_mb(value))
        text = plain_text(value)
        if text == "none":
            return cls(None)
        if text.endswith(PER_CPU):
            return cls(memory_mb(text.removesuffix(PER_CPU)), per_cpu=True)
        return cls(memory_mb(text))

    def __str__(self) -> str:
        if self.mb is None:
            return "none"
        return memory_text(self.mb) + (PER_CPU if self.per_cpu else "")
