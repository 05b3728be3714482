"""The port of rank 0's store: that of the environment, or another one where it is taken."""

import errno
import os
import socket

from ddp_slurm.rank_env import FIRST_PORT, PORT_COUNT, RankEnv
from ddp_slurm.training.process_group.ending import print_last
from ddp_slurm.training.process_group.sealed import Secret
from ddp_slurm.training.process_group.startup_check import is_loopback
from ddp_slurm.training.process_group.store_server import StoreServer

PORTS = 8
"""Ports that rank 0 tries, and the others after it."""
BACKLOG = 1024


def ports_of(env: RankEnv, secret: Secret) -> list[int]:
    """The port of the environment, and those that all ranks try where it is taken.

    Nobody else can know the latter: they follow from the token.
    """
    ports = [] if torchrun_has_store() else [env.master_port]
    for number in range(1, PORTS):
        code = secret.code(b"port %d" % number)
        ports.append(FIRST_PORT + int.from_bytes(code[:8], "big") % PORT_COUNT)
    return ports


def torchrun_has_store() -> bool:
    """Whether torchrun's agent keeps a store of its own on the port of the environment."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def serve_store(env: RankEnv, secret: Secret, place: str) -> None:
    """On rank 0: open the store on the first of its ports that is free.

    ``place`` names this rank in messages. Raises OSError where none is free.
    """
    ports = ports_of(env, secret)
    for port in ports:
        try:
            listeners = listen(env.master_addr, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port == ports[-1]:
                raise
            continue
        if port != ports[0]:
            print_last(f"note: {place}: port {ports[0]} is taken; the ranks meet at {port}")
        StoreServer(listeners, secret, lambda text: print_last(f"note: {place} {text}")).start()
        return


def listen(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen at this host's own addresses among those of ``address``.

    At all of this host's addresses where there are none, or where its name stands for the loopback
    here, as Ubuntu writes it into /etc/hosts. Raises OSError.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    # The same name stands for another address on the other hosts.
    is_mixed = address != "localhost" and not is_loopback(address)
    listeners: list[socket.socket] = []
    for family, place in places:
        if is_mixed and is_loopback(str(place[0])):
            continue
        try:
            listeners.append(socket.create_server(place, family=family, backlog=BACKLOG))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for listener in listeners:
                    listener.close()
                raise
    return listeners or [_listen_everywhere(port)]


def _listen_everywhere(port: int) -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=has_both)
