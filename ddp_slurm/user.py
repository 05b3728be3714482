"""Who runs this process."""

import os
import pwd


def user_name() -> str:
    """The name of this process's uid, as Slurm sees it.

    $USER and $LOGNAME are another user's after a plain ``su``.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a bare uid, as in some containers
        return str(os.geteuid())
