"""Rank 0's store: with a token only this job's processes can use it, without one anybody who
reaches the port."""

import json
import os
import secrets
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_slurm import job_env
from ddp_slurm.job_env import JobEnv
from ddp_slurm.rank_env import RankEnv
from ddp_slurm.training.process_group.port import ports_of, serve_store, torchrun_has_store
from ddp_slurm.training.process_group.sealed import Secret
from ddp_slurm.training.process_group.token_store import TokenStore


def connect(env: RankEnv, seconds: float, opens_as: str | None = None) -> Store:
    """A connection to rank 0's store.

    Args:
        seconds: the longest that connecting may take.
        opens_as: on rank 0, which opens the store first, its name in messages.

    Raises RuntimeError without a connection in time, and OSError too where no port is free.
    """
    secret = _secret()
    if secret is not None:
        if opens_as is not None:
            serve_store(env, secret, opens_as)
        return TokenStore(env.master_addr, ports_of(env, secret), secret, seconds)
    store = TCPStore(
        env.master_addr,
        env.master_port,
        is_master=opens_as is not None and not torchrun_has_store(),
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    return PrefixStore(_world_name(), store)


def connect_again(store: Store, env: RankEnv, seconds: float) -> Store:
    """A second connection to the same store as ``store``. Raises RuntimeError as ``connect``."""
    return store.clone() if isinstance(store, TokenStore) else connect(env, seconds)


def group_store(store: Store, env: RankEnv, backend: str, seconds: float) -> Store:
    """The store in which torch's process group meets. All ranks call it.

    NCCL's threads read their store while Python may be waiting for the GPU, or is ending. They get
    torch's own, at a free port of rank 0, and a prefix of its keys that nobody else can guess.
    """
    if backend != "nccl" or not isinstance(store, TokenStore):
        return PrefixStore("group", store)
    key, limit = "nccl store", timedelta(seconds=seconds)
    if env.rank == 0:
        own = TCPStore(env.master_addr, 0, is_master=True, timeout=limit, wait_for_workers=False)
        prefix = secrets.token_hex(16)
        store.set(key, json.dumps([own.port, prefix]))
    else:
        port, prefix = json.loads(store.get(key))
        own = TCPStore(env.master_addr, port, timeout=limit, wait_for_workers=False)
    return PrefixStore(prefix, own)


def describe_token() -> str:
    """What this rank has, and rank 0 must have, as the end of a question."""
    if _secret() is None:
        return f"no {job_env.TOKEN}, as this rank?"
    return f"this rank's {job_env.TOKEN}?"


def _secret() -> Secret | None:
    token = JobEnv.from_environ().token
    return None if token is None else Secret(token, _world_name())


def _world_name() -> str:
    """A second job that was given the same port must not interfere; and torchrun keeps one store,
    and its token, over its restarts. With RANK set by hand a world may span several Slurm jobs."""
    name = "TORCHELASTIC_RUN_ID" if "RANK" in os.environ else "SLURM_JOB_ID"
    job = os.environ.get(name, "")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"ddp_slurm/{job}/{restart}"
