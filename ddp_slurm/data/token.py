"""The token of a data set's server: in the environment, or in a file that only its user can read.

Never in an argument, which every user of a machine can read.
"""

import hmac
import os
import re
import stat
from pathlib import Path

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.files import write_whole
from ddp_slurm.job_env import JobEnv, new_token
from ddp_slurm.trust import is_ours
from ddp_slurm.user import name_of


def default_file() -> Path:
    """In the home, which nodes often share."""
    return Path.home() / ".config" / "ddp_slurm" / "data-token"


def find_token(file: Path | None = None) -> str:
    """The token of DDP_SLURM_DATA_TOKEN, else of the file. Raises DataSetError."""
    token = JobEnv.from_environ().data_token
    if token is not None and file is None:
        return token
    path = file or default_file()
    try:
        return _read(path)
    except FileNotFoundError:
        raise DataSetError(
            f"no token for the data set: neither the variable DDP_SLURM_DATA_TOKEN nor the file "
            f"{path}, which ddp-slurm data serve makes on its machine. Copy the file here with "
            "mode 0600"
        ) from None
    except OSError as error:
        raise DataSetError(f"{path}: {error.strerror}") from None


def find_or_make_token(file: Path | None) -> tuple[str, str]:
    """The server's token, and where it is. Raises DataSetError."""
    token = JobEnv.from_environ().data_token
    if token is not None and file is None:
        return token, "the variable DDP_SLURM_DATA_TOKEN"
    path = file or default_file()
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, new_token() + "\n", mode=0o600)
    return find_token(path), str(path)


def _read(path: Path) -> str:
    """Raises DataSetError, or OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, encoding="ascii", errors="replace") as file:
        info = os.fstat(descriptor)
        if not is_ours(info.st_uid):
            raise DataSetError(f"{path}: belongs to another user, {name_of(info.st_uid)}")
        if stat.S_IMODE(info.st_mode) & 0o077:
            raise DataSetError(f"{path}: other users can read the token in it; chmod 600 it")
        text = file.read(200).strip()
    if not re.fullmatch("[0-9a-f]{32,128}", text):
        raise DataSetError(f"{path}: expected a token, 32 to 128 digits of 0-9a-f")
    return text


def is_token(given: str, token: str) -> bool:
    """Whether the two are the same. Takes the same time wherever they differ."""
    # aiohttp decodes the bytes of a header that are not UTF-8 to surrogates
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
