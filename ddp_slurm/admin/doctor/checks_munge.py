"""Check of munge, which signs the messages between Slurm's daemons."""

import re
from collections.abc import Iterator

from ddp_slurm.admin.doctor.finding import Finding, Findings, error, skipped
from ddp_slurm.admin.doctor.snapshot import Snapshot
from ddp_slurm.admin.facts import Block
from ddp_slurm.ssh.run import last_lines

INSTALL = "ddp-slurm cluster install --step munge"


def munge_key(snapshot: Snapshot) -> Findings:
    """A credential of one node is accepted by all others, and only munge can read the key."""
    if snapshot.credential_from is None:
        yield from _nodes_without_credential(snapshot)
    else:
        for name, facts in snapshot.facts.items():
            block = facts.block("unmunge") or Block(1, "Failed to access munged")
            finding = _decoding_error(name, block, snapshot.credential_from)
            if finding:
                yield finding
    hidden = [name for name, facts in snapshot.facts.items() if facts.first("munge_key_hidden")]
    if hidden:
        yield skipped("only root sees who can read /etc/munge/munge.key", hidden)
    for name, facts in snapshot.facts.items():
        key = facts.first("munge_key")
        mode = key.split()[0] if key else "400"
        if int(mode, 8) & 0o077:
            cause = f"/etc/munge/munge.key has mode {mode}: others can read it"
            yield error(name, cause, INSTALL)


def _nodes_without_credential(snapshot: Snapshot) -> Iterator[Finding]:
    """No node could make one."""
    installed = {name: f for name, f in snapshot.facts.items() if f.first("munged")}
    if not installed:
        yield skipped("munge is installed on no node")
    silent = []
    for name, facts in installed.items():
        finding = _permission_error(name, facts.text("credential"))
        if finding:
            yield finding
        else:
            silent.append(name)
    if silent:
        yield error(silent, "munged does not respond on any node", INSTALL)


def _decoding_error(name: str, block: Block, credential_from: str) -> Finding | None:
    """Why the node does not decode the credential of ``credential_from``."""
    permission_error = _permission_error(name, block.text)
    if permission_error:
        return permission_error
    if "Failed to access" in block.text:
        return error(name, "munged is not running", f"{INSTALL} --node {name}")
    if "Invalid credential" in block.text:
        cause = f"another munge key than {credential_from}: Invalid credential"
        return error(name, cause, f"{INSTALL}; munged reads its key at start only")
    is_clock = re.search(r"Expired|Rewound|Replayed", block.text)  # the check "clock" reports it
    if block.status and not is_clock:
        return error(name, f"munge: {last_lines(block.text) or 'no message'}", INSTALL)
    return None


def _permission_error(name: str, text: str) -> Finding | None:
    """munged may be running: the user who asked cannot reach its socket.

    Source: github.com/dun/munge/issues/131: the folder has mode 0755, the socket 0777.
    """
    match = re.search(r'Failed to access "(.*)/([^/"]*)": Permission denied', text)
    if match is None:
        return None
    folder, socket = match[1], match[2]
    cause = f"no permission for munge's socket {folder}/{socket}: Permission denied"
    fix = f"chmod 0755 {folder}, then systemctl restart munge, which makes the socket again"
    return error(name, cause, fix)
