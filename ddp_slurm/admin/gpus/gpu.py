"""One GPU, whoever made it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Outputs = Mapping[str, Sequence[tuple[int, str]]]
"""Exit status and text of each command, by the name that cluster_setup/facts.sh gives it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card."""

    index: int
    name: str
    memory_mib: int
    """0 where it is not known."""
    vendor: str
    """``nvidia`` or ``amd``."""
    minor: int | None = None
    """The N of its device file, which need not be its index; None where it is not known."""
    driver: str = ""
    compute_capability: str = ""
    """``8.6`` for NVIDIA, ``gfx90a`` for AMD."""
    bus_id: str = ""
    mig_profile: str = ""
    """``1g.10gb`` for an instance of a divided card, which Slurm and torch treat as a GPU."""


def successful_text(outputs: Outputs, name: str) -> str:
    """What a command printed where it succeeded."""
    return "\n".join(text for status, text in outputs.get(name, ()) if status == 0)
