"""``ddp-slurm data serve``: a folder over HTTP, read-only, for clients that know the token."""

import html
import os
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from ddp_slurm.console import say
from ddp_slurm.data import folder as folders
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.folder import Kept
from ddp_slurm.data.pieces import Pieces
from ddp_slurm.data.progress import bar
from ddp_slurm.data.token import find_or_make_token
from ddp_slurm.data.tracker import Report, Tracker
from ddp_slurm.data.web import MANIFEST_HEADER, application, piece_number, send_piece
from ddp_slurm.errors import DdpSlurmError, counted

WAITING_CONNECTIONS = 1024
SHUTDOWN_SECONDS = 2.0


class _OpenedFile(web.FileResponse):
    """A file that was opened and checked; its path may lead to another one by now."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(
            f"/proc/self/fd/{descriptor}", headers={"X-Content-Type-Options": "nosniff"}
        )
        self.content_type = "application/octet-stream"
        self._descriptor = descriptor

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send it, once."""
        try:
            return await super().prepare(request)
        finally:
            os.close(self._descriptor)


class Server:
    """The handlers of one data set."""

    def __init__(self, folder: Path, kept: Kept) -> None:
        self.name = folder.resolve().name
        self.manifest = kept.manifest
        self.pieces = Pieces(kept.manifest, folder, kept.stamps)
        self.tracker = Tracker(len(kept.manifest.pieces))
        self._files = {file.path: index for index, file in enumerate(kept.manifest.files)}

    def application(self, token: str) -> web.Application:
        app = application(token)
        app.add_routes(
            [
                web.get("/", self.listing),
                web.get("/manifest", self.send_manifest),
                web.get("/files/{path:.+}", self.send_file),
                web.get("/pieces/next", self.send_next),
                web.get(r"/pieces/{piece:\d{1,9}}", self.send_piece),
                web.post("/nodes", self.take_report),
            ]
        )
        return app

    async def listing(self, request: web.Request) -> web.Response:
        """The files, for a browser."""
        rows = "".join(
            f'<tr><td><a href="/files/{quote(file.path)}">{html.escape(file.path)}</a>'
            f"<td align=right>{file.bytes:,}\n"
            for file in self.manifest.files
        )
        size = f"{counted(len(self.manifest.files), 'file')}, {self.manifest.total:,} bytes"
        text = (
            f"<!doctype html><meta charset=utf-8><title>{html.escape(self.name)}</title>\n"
            f"<h1>{html.escape(self.name)}</h1>\n<p>{size}, manifest {self.manifest.digest}</p>\n"
            f"<table>\n{rows}</table>\n"
        )
        headers = {"Content-Security-Policy": "default-src 'none'"}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def send_manifest(self, request: web.Request) -> web.Response:
        """The manifest; status 204 for a client that has it."""
        headers = {MANIFEST_HEADER: self.manifest.digest}
        if request.headers.get(MANIFEST_HEADER) == self.manifest.digest:
            return web.Response(status=204, headers=headers)
        response = web.json_response(text=self.manifest.text, headers=headers)
        response.enable_compression()
        return response

    async def send_file(self, request: web.Request) -> web.StreamResponse:
        """A file or a range of it; only what the manifest lists has an address."""
        index = self._files.get(request.match_info["path"])
        if index is None:
            raise web.HTTPNotFound(text="no such file in the data set\n")
        return _OpenedFile(self.pieces.open(index))

    async def send_piece(self, request: web.Request) -> web.StreamResponse:
        self._check_manifest(request)
        piece = piece_number(request, len(self.manifest.pieces))
        return await send_piece(request, self.pieces, piece)

    async def send_next(self, request: web.Request) -> web.StreamResponse:
        """A piece that no node has yet, or status 204: the others have them all."""
        self._check_manifest(request)
        piece = self.tracker.give(request.query.get("node", ""))
        if piece is None:
            return web.Response(status=204)
        try:
            return await send_piece(request, self.pieces, piece)
        except BaseException:
            self.tracker.take_back(piece)
            raise

    async def take_report(self, request: web.Request) -> web.Response:
        """A node's report of what it has; the answer is what the others have."""
        self._check_manifest(request)
        try:
            report = Report.read(await request.json(), self.tracker.pieces)
        except (ValueError, DataSetError) as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from None
        return web.json_response(self.tracker.add(report))

    def _check_manifest(self, request: web.Request) -> None:
        given = request.headers.get(MANIFEST_HEADER, self.manifest.digest)
        if given != self.manifest.digest:
            raise web.HTTPConflict(text="the server has another data set now\n")


def serve_folder(folder: Path, bind: str, token_file: Path | None) -> None:
    """Serve until SIGINT or SIGTERM. Raises DataSetError, or OSError."""
    host, port = _host_and_port(bind)
    token, where = find_or_make_token(token_file)
    with bar("checksums", None) as on_bytes:
        kept, is_new = folders.find_or_make(folder, on_bytes)
    if is_new:
        try:
            folders.keep(kept, folder)
        except DdpSlurmError as error:
            say(f"note: {error}; the checksums will be made again at the next start")
    server = Server(folder, kept)
    manifest = kept.manifest
    say(f"{folder}: {counted(len(manifest.files), 'file')}, {manifest.total:,} bytes")
    say(f"the token is in {where}")
    say(f"in job.yaml: dataset: http://{bind}")
    web.run_app(
        server.application(token),
        host=host,
        port=port,
        backlog=WAITING_CONNECTIONS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        access_log=None,
        print=None,
    )


def _host_and_port(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DataSetError(f"--bind {bind!r}: expected ADDRESS:PORT, such as 192.168.8.1:8400")
    return host, int(port)
