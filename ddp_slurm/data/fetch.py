"""A node's copy of a data set: fetched once, and passed on to the other nodes of the job."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from ddp_slurm.console import say
from ddp_slurm.data.cache import Cache
from ddp_slurm.data.client import Client
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.manifest import Manifest
from ddp_slurm.data.pieces import Pieces
from ddp_slurm.data.swarm import Member, Swarm
from ddp_slurm.data.web import application, piece_number, send_piece

FIRST_ANSWER_SECONDS = 30.0
"""How long a server may be silent at the start."""
PROGRESS_SECONDS = 10.0


async def obtain(url: str, token: str, cache: Cache, member: Member) -> Path:
    """The folder with the complete data set of a server, on this node.

    Returns when all nodes of the job have it. Raises DataSetError, or OSError.
    """
    client = Client(url, token)
    try:
        manifest = await _manifest(client, cache)
        if manifest is None:
            return _without_server(client, cache)
        client.fetches(manifest)
        await _fetch(client, token, cache, manifest, member)
        return cache.complete(manifest)
    finally:
        await client.close()


async def _manifest(client: Client, cache: Cache) -> Manifest | None:
    """The server's manifest, or None where the server does not respond."""
    known = cache.known(client.server)
    give_up = time.monotonic() + FIRST_ANSWER_SECONDS
    while True:
        try:
            found = await client.manifest(known.manifest.digest if known else None)
        except aiohttp.ClientError as error:
            if time.monotonic() < give_up:
                await asyncio.sleep(1)
                continue
            if known is None:
                raise DataSetError(f"the server does not respond: {error}") from None
            return None
        return known.manifest if found is None and known else found


def _without_server(client: Client, cache: Cache) -> Path:
    """The copy of an earlier job. Raises DataSetError where it is not as it was."""
    known = cache.known(client.server)
    if known is None or not cache.is_complete(known.manifest):
        raise DataSetError(
            "the server does not respond, and files of the copy on this node were changed"
        )
    say(f"note: {client.server} does not respond; this node uses its copy of an earlier job")
    return cache.complete(known.manifest)


async def _fetch(
    client: Client, token: str, cache: Cache, manifest: Manifest, member: Member
) -> None:
    lock = cache.lock(manifest)
    # Nothing else runs in this process yet. The other ranks of the node wait here.
    lock.acquire()
    try:
        if cache.is_complete(manifest):
            pieces = Pieces(manifest, cache.complete(manifest))
            have = (1 << len(manifest.pieces)) - 1
            seeds = member.seeds
        else:
            pieces, have = cache.open(manifest)
            seeds = True
        async with _neighbour(client.server, pieces, token) as url:
            swarm = Swarm(client, pieces, have, member, url if seeds else None)
            swarm.start()
            try:
                if not swarm.is_complete:
                    await _fetch_missing(swarm)
                    cache.finish(pieces)
                cache.note(client.server, manifest)
                lock.release()
                await swarm.wait_for_others()
            finally:
                await swarm.stop()
    finally:
        lock.release()


async def _fetch_missing(swarm: Swarm) -> None:
    started = time.monotonic()
    progress = asyncio.create_task(_say_progress(swarm))
    try:
        await swarm.fetch()
    finally:
        progress.cancel()
    seconds = time.monotonic() - started
    total = swarm.pieces.manifest.total
    say(
        f"data set: complete after {seconds:.1f} s, {total:,} bytes, "
        f"{swarm.from_server:,} of them from the server"
    )


async def _say_progress(swarm: Swarm) -> None:
    count = len(swarm.pieces.manifest.pieces)
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        say(f"data set: {swarm.have.bit_count()} of {count} pieces")


@asynccontextmanager
async def _neighbour(server: str, pieces: Pieces, token: str) -> AsyncIterator[str]:
    """This node's own server, from which the others fetch. Yields its URL."""

    async def send(request: web.Request) -> web.StreamResponse:
        return await send_piece(request, pieces, piece_number(request, len(pieces.manifest.pieces)))

    app = application(token)
    app.add_routes([web.get(r"/pieces/{piece:\d{1,9}}", send)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        address = _address_towards(server)
        await web.TCPSite(runner, address, 0).start()
        host = f"[{address}]" if ":" in address else address
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _address_towards(server: str) -> str:
    """The address by which this node reaches the server, so that it listens nowhere else."""
    parts = urlsplit(server)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: sends nothing
        return str(probe.getsockname()[0])
