"""What ``--uneven`` refuses, with the place in the user's script."""

import sys
import sysconfig

from ddp_slurm.errors import DdpSlurmError

STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class UnevenError(DdpSlurmError):
    """A script that cannot train exactly on uneven shares as it is."""

    def __init__(self, message: str) -> None:
        super().__init__(f"--uneven: {message}")


def users_line() -> str:
    """``train.py:31`` of the innermost caller that is part of no package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        is_ours = module.partition(".")[0] == "ddp_slurm"
        is_package = "site-packages" in code or code.startswith((STANDARD_LIBRARY, "<frozen"))
        if not is_ours and not is_package:
            return f"{code}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"
