"""One file from the network: resumed after an interruption, and checked by its checksum."""

import asyncio
import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from ddp_slurm.console import say
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.progress import bar
from ddp_slurm.errors import quoted

ATTEMPTS = 5
CHUNK_BYTES = 2**20
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60)
DIGITS = {"sha256": 64, "sha512": 128, "md5": 32}


@dataclass(frozen=True)
class Checksum:
    """What a downloaded file has to hash to."""

    algorithm: str
    digest: str

    @classmethod
    def read(cls, text: str) -> "Checksum":
        """``sha256:HEX``; raises ValueError."""
        algorithm, _, digest = text.lower().rpartition(":")
        algorithm = algorithm or "sha256"
        digits = DIGITS.get(algorithm)
        if digits is None or not re.fullmatch(f"[0-9a-f]{{{digits}}}", digest):
            raise ValueError(
                f"{quoted(text)} is not a checksum such as sha256:HEX, of 64 digits; "
                f"known are {', '.join(DIGITS)}"
            )
        return cls(algorithm, digest)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.digest}"

    def of(self, path: Path) -> "Checksum":
        """The checksum of a file, by the same algorithm. Raises OSError."""
        digest = hashlib.new(self.algorithm, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return Checksum(self.algorithm, digest.hexdigest())

    def check(self, path: Path, what: str) -> None:
        """Raises DataSetError for a file that does not match."""
        found = self.of(path)
        if not hmac.compare_digest(found.digest, self.digest):
            raise DataSetError(f"{what}: its checksum is {found}, expected {self}")


def download(url: str, path: Path, checksum: Checksum) -> None:
    """Download ``url`` to ``path``, which then has this checksum, or does not exist.

    ``PATH.partial`` keeps what has arrived; the next call resumes from there. Raises DataSetError.
    """
    if path.exists():
        checksum.check(path, str(path))
        return
    partial = path.with_name(f"{path.name}.partial")
    resumed = partial.exists()
    asyncio.run(_receive(url, partial))
    try:
        checksum.check(partial, url)
    except DataSetError as error:
        partial.unlink()
        if not resumed:
            raise
        say(f"{error}; downloading it from scratch")
        asyncio.run(_receive(url, partial))
        checksum.check(partial, url)
    partial.rename(path)


async def _receive(url: str, partial: Path) -> None:
    session = aiohttp.ClientSession(
        timeout=TIMEOUT,
        trust_env=True,
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,  # some servers call the gzip of a .tar.gz the answer's encoding
    )
    async with session:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await _receive_rest(session, url, partial)
                break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if attempt == ATTEMPTS:
                    raise DataSetError(f"{url}: {error}") from None
                say(f"{url}: {error}; trying again")
                await asyncio.sleep(2**attempt / 2)
            except aiohttp.ClientError as error:
                raise DataSetError(f"{url}: {error}") from None


async def _receive_rest(session: aiohttp.ClientSession, url: str, partial: Path) -> None:
    """Append to the partial file what it lacks."""
    done = partial.stat().st_size if partial.exists() else 0
    headers = {"Range": f"bytes={done}-"} if done else {}
    async with session.get(url, headers=headers) as response:
        if response.status == 416:  # nothing is missing
            return
        if response.status not in (200, 206):
            raise DataSetError(f"{url}: the server's answer is {response.status} {response.reason}")
        if response.status == 200:  # it knows no ranges
            done = 0
        length = response.content_length
        total = None if length is None else done + length
        with (
            partial.open("ab" if done else "wb") as file,
            bar(partial.stem, total, done) as on_bytes,
        ):
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                file.write(chunk)
                on_bytes(len(chunk))
