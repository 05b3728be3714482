"""Who runs this process."""

import grp
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


def group_names() -> frozenset[str]:
    """The names of the groups of this process."""
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:  # a group without a name
            continue
    return frozenset(names)
