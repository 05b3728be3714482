"""What the server and a node that passes pieces on have in common: the token, and the pieces."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import BasicAuth, hdrs, web

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.pieces import Pieces
from ddp_slurm.data.token import is_token

PIECE_HEADER = "Piece"
MANIFEST_HEADER = "Manifest"
"""Which data set a request is about: the digest of its manifest."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(token: str) -> web.Application:
    """An application that answers only clients that know the token."""

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_token(_given_token(request), token):
            # a browser asks for a password: the token; the name does not matter
            asks = {hdrs.WWW_AUTHENTICATE: 'Basic realm="data set", charset="UTF-8"'}
            return web.Response(status=401, text="wrong or missing token\n", headers=asks)
        try:
            return await handler(request)
        except DataSetError as error:
            return web.Response(status=410, text=f"{error}\n")

    return web.Application(middlewares=[check_token], client_max_size=2**20)


def _given_token(request: web.Request) -> str:
    text = request.headers.get(hdrs.AUTHORIZATION, "")
    scheme, _, rest = text.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    try:
        return str(BasicAuth.decode(text).password)
    except ValueError:
        return ""


async def send_piece(request: web.Request, pieces: Pieces, piece: int) -> web.StreamResponse:
    """A piece as the answer, read bit by bit: many clients at once need little memory.

    Raises DataSetError before the answer begins; later errors break the connection.
    """
    chunks = pieces.chunks(piece)
    data = await asyncio.to_thread(next, chunks, b"")
    response = web.StreamResponse(headers={PIECE_HEADER: str(piece)})
    response.content_type = "application/octet-stream"
    response.content_length = sum(span.length for span in pieces.manifest.spans(piece))
    await response.prepare(request)
    while data:
        await response.write(data)
        data = await asyncio.to_thread(next, chunks, b"")
    await response.write_eof()
    return response


def piece_number(request: web.Request, count: int) -> int:
    """The number in the address. Raises HTTPNotFound for one that the data set does not have."""
    number = int(request.match_info["piece"])
    if number >= count:
        raise web.HTTPNotFound(text=f"there are {count} pieces\n")
    return number
