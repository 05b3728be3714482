"""Check of the user accounts."""

from collections.abc import Iterator

from ddp_slurm.admin.doctor.finding import Findings, error, listed, warning
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Facts

DAEMON_USERS = ("munge", "slurm")
PEOPLES_UIDS = range(1000, 60000)
"""The range from which adduser takes the ids of people."""


def users(snapshot: Snapshot) -> Findings:
    """A name has one id on all nodes, and who may run jobs exists on all."""
    accounts: dict[str, dict[str, list[str]]] = {}  # by name the nodes of each id
    asked = [name for name, facts in snapshot.facts.items() if facts.block("users")]
    for node in asked:
        for user, uid in _relevant_users(snapshot.facts[node]):
            accounts.setdefault(user, {}).setdefault(uid, []).append(node)
    for user, nodes_of_uid in accounts.items():
        is_daemon = user in DAEMON_USERS
        if is_daemon:
            fix = "ddp-slurm cluster install --step users"
        else:
            fix = f"useradd -u ID {user}, the same ID on all nodes"
        present = {name for names in nodes_of_uid.values() for name in names}
        missing = [name for name in asked if name not in present]
        if len(nodes_of_uid) > 1:
            fewest = min(nodes_of_uid.values(), key=len)
            ids = listed(nodes_of_uid)
            if not is_daemon:
                fix = f"usermod -u ID {user}; groupmod -g ID {user}; chown -R {user}: its files"
            yield error(fewest, f"user {user} has different ids: {ids}", fix)
        elif missing:
            uid = next(iter(nodes_of_uid))
            cause = f"user {user} (id {uid}) does not exist"
            if is_daemon:
                yield error(missing, cause, fix)
            elif len(present) > 1:  # a user of one node only is that machine's own
                yield warning(missing, cause, fix)
    yield from _homes(snapshot)


def _homes(snapshot: Snapshot) -> Findings:
    """A home folder that exists on some nodes only; without any, nobody wants it."""
    nodes_without: dict[str, list[str]] = {}
    for node, facts in snapshot.facts.items():
        for line in facts.values.get("no_home", ()):
            nodes_without.setdefault(line, []).append(node)
    for line, nodes in nodes_without.items():
        user, home = line.split(maxsplit=1)
        if len(nodes) < len(snapshot.facts):
            fix = f"on it: install -d -m 750 -o {user} -g $(id -g {user}) {home}"
            yield warning(nodes, f"the home folder {home} of {user} does not exist", fix)


def _relevant_users(facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and ids of munge, slurm, and of people: those who can log in. See passwd(5).

    A person's group counts, too: files that one node's job makes are read on another.
    """
    for line in facts.block_lines("users"):
        fields = line.split(":")
        if len(fields) < 7:
            continue
        name, uid, gid, shell = fields[0], fields[2], fields[3], fields[6]
        is_person = uid.isdecimal() and int(uid) in PEOPLES_UIDS
        can_log_in = not shell.endswith(("nologin", "false"))
        if name in DAEMON_USERS:
            yield name, uid
        elif is_person and can_log_in:
            yield name, uid if gid == uid else f"{uid}, group {gid}"
