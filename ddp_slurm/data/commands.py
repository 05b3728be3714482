"""``ddp-slurm data prepare | serve | check``."""

from importlib.util import find_spec
from pathlib import Path

from ddp_slurm.console import Commands, add_command, say, typed
from ddp_slurm.data.errors import DataSetError

NEEDED = ("aiohttp", "filelock", "rich")
DEFAULT_BIND = "127.0.0.1:8400"


def add_commands(commands: Commands) -> None:
    data = commands.add_parser(
        "data",
        description="One data set for all nodes: prepare it on one machine, and serve it to them.",
        help="prepare a data set, and serve it to the nodes of jobs",
    )
    actions = data.add_commands()
    _add_prepare(actions)
    _add_serve(actions)
    parser = add_command(actions, "check", check)
    parser.add_argument("folder", type=Path, metavar="FOLDER")


def _add_prepare(actions: Commands) -> None:
    parser = add_command(actions, "prepare", prepare)
    parser.add_argument(
        "source", metavar="NAME|URL|FILE", help="cifar10, cifar100, a URL, or an archive"
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="the folder to make"
    )
    parser.add_argument(
        "--checksum",
        type=_checksum,
        metavar="ALGORITHM:HEX",
        help="of the file at the URL: sha256 (the default), sha512 or md5",
    )


def _add_serve(actions: Commands) -> None:
    parser = add_command(actions, "serve", serve)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--bind",
        default=DEFAULT_BIND,
        metavar="ADDRESS:PORT",
        help="an address of this machine that the nodes reach [default: %(default)s]",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="what clients have to know, mode 0600; made where it does not exist [default: the "
        "variable DDP_SLURM_DATA_TOKEN, else ~/.config/ddp_slurm/data-token]",
    )


def prepare(*, source: str, to: Path, checksum: object) -> None:
    """Download a data set, check it and unpack it into a folder.

    An interrupted download resumes where it stopped. The folder appears when it is complete.
    """
    _check_packages()
    from ddp_slurm.data.download import Checksum
    from ddp_slurm.data.prepare import prepare as prepare_folder
    from ddp_slurm.data.prepare import source_of

    wanted = checksum if isinstance(checksum, Checksum) else None
    prepare_folder(source_of(source, wanted), to.expanduser())


def serve(*, folder: Path, bind: str, token_file: Path | None) -> None:
    """Serve a folder read-only over HTTP to the nodes of jobs, until Ctrl-C.

    In job.yaml: dataset: http://ADDRESS:PORT. Its files must not change meanwhile.
    """
    _check_packages()
    from ddp_slurm.data.server import serve_folder

    serve_folder(folder, bind, token_file)


def check(*, folder: Path) -> None:
    """Read a served or fetched data set, and compare every byte with its checksums.

    Exit status 1 where one differs.
    """
    _check_packages()
    from ddp_slurm.data import folder as folders
    from ddp_slurm.data.progress import bar

    with bar("checking", None) as on_bytes:
        bad = folders.check(folder, on_bytes)
    for path in bad:
        say(
            f"{folder / path}: has bytes that differ from their checksums, or shares a piece with "
            "a file that has"
        )
    if bad:
        raise SystemExit(1)
    say(f"{folder}: every byte matches")


def _check_packages() -> None:
    """Raises DataSetError for packages that only these commands need."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise DataSetError(f"this needs {', '.join(missing)}: pip install 'ddp_slurm[data]'")


def _checksum(text: str) -> object:
    _check_packages()
    from ddp_slurm.data.download import Checksum

    return typed(Checksum.read)(text)
