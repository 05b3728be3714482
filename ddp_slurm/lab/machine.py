"""What a lab needs from the machine."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ddp_slurm.lab.errors import LabError

PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
}
"""Program -> package of Debian and Ubuntu."""


def with_system_programs(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with /usr/sbin and /sbin on PATH, which root lacks after a plain ``su``."""
    return {**environ, "PATH": f"{environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def check_machine(slurm_root: str | Path | None = None) -> None:
    """Raises LabError where a lab cannot run: not root, or programs are missing."""
    if os.geteuid() != 0:
        raise LabError(
            "a lab makes network namespaces and device files, which needs root: "
            "sudo ddp-slurm lab ..."
        )
    path = with_system_programs(os.environ)["PATH"]
    needed = ["ip"] if slurm_root else list(PROGRAMS)
    missing = [program for program in needed if shutil.which(program, path=path) is None]
    if missing:
        packages = sorted({PROGRAMS[program] for program in missing})
        raise LabError(
            f"not installed: {', '.join(missing)}. On Debian and Ubuntu: "
            f"apt-get install -y --no-install-recommends {' '.join(packages)}"
        )
    if slurm_root and not (Path(slurm_root) / "usr/sbin/slurmd").exists():
        raise LabError(
            f"{slurm_root}: usr/sbin/slurmd does not exist; make this root folder with "
            "debootstrap and install slurm-wlm and munge in it"
        )
