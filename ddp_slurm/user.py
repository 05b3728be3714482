"""Who runs this process."""

import grp
import os
import pwd


def user_name() -> str:
    """The name of this process's uid, as Slurm sees it.

    $USER and $LOGNAME are another user's after a plain ``su``.
    """
    return name_of(os.geteuid())


def name_of(uid: int) -> str:
    """The name of a user, or the number where it has none, as in some containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_names() -> frozenset[str]:
    """The names of the groups of this process."""
    names = set()
    for number in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:  # a group without a name
            continue
    return frozenset(names)


def shares_group(gid: int) -> bool:
    """Whether a group may have other members than this user.

    False for the group of a user's own name, which useradd makes for each.
    """
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return True
    return group.gr_name != user_name() or bool(set(group.gr_mem) - {user_name()})
