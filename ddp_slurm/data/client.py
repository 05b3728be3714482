"""What a node asks the server of a data set, and the other nodes."""

from typing import Any

import aiohttp
from aiohttp import hdrs

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.manifest import Manifest
from ddp_slurm.data.tracker import Report
from ddp_slurm.data.web import MANIFEST_HEADER, PIECE_HEADER

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=20)
MAX_ERROR_TEXT = 500


class Client:
    """Requests with the token. Raises DataSetError for answers that a retry would not change.

    Raises aiohttp.ClientError where the other side does not respond, or breaks the connection.
    """

    def __init__(self, server: str, token: str) -> None:
        self.server = server.rstrip("/")
        headers = {hdrs.AUTHORIZATION: f"Bearer {token}"}
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=headers, timeout=TIMEOUT, connector=connector)
        self._about: dict[str, str] = {}

    async def close(self) -> None:
        await self._session.close()

    async def manifest(self, known: str | None) -> Manifest | None:
        """The server's manifest; None where it is the known one, by its digest."""
        headers = {} if known is None else {MANIFEST_HEADER: known}
        async with self._session.get(f"{self.server}/manifest", headers=headers) as answer:
            await _check(answer)
            if answer.status == 204:
                return None
            return Manifest.read(await answer.read(), self.server)

    def fetches(self, manifest: Manifest) -> None:
        """All later requests are about this manifest; a server that has another one refuses."""
        self._about = {MANIFEST_HEADER: manifest.digest}

    async def report(self, report: Report) -> dict[str, Any]:
        """Report to the server. Returns what the other nodes have."""
        url = f"{self.server}/nodes"
        async with self._session.post(url, json=report.to_json(), headers=self._about) as answer:
            await _check(answer)
            data: dict[str, Any] = await answer.json()
            return data

    async def next_piece(self, node: str) -> tuple[int, bytes] | None:
        """A piece that no node has yet; None where there is none."""
        url = f"{self.server}/pieces/next"
        async with self._session.get(url, params={"node": node}, headers=self._about) as answer:
            await _check(answer)
            if answer.status == 204:
                return None
            return int(answer.headers[PIECE_HEADER]), await answer.read()

    async def piece(self, piece: int, url: str | None = None) -> bytes:
        """A piece of the server, or of the node at ``url``."""
        address = f"{url or self.server}/pieces/{piece}"
        async with self._session.get(address, headers=self._about) as answer:
            await _check(answer)
            return await answer.read()


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raises DataSetError for a refusal, and ClientError for an error that may pass."""
    if answer.status < 400:
        return
    text = (await answer.text(errors="replace"))[:MAX_ERROR_TEXT].strip()
    if answer.status >= 500:
        answer.raise_for_status()
    if answer.status == 401:
        raise DataSetError(
            "the server refuses the token of this node: it is not the one of ddp-slurm data serve"
        )
    raise DataSetError(f"the server's answer is {answer.status} {answer.reason}: {text}")
