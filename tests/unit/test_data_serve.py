"""``ddp-slurm data serve``: ranges, the token, and that nothing leaves the folder."""

import asyncio
import base64
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.manifest import Manifest
from ddp_slurm.data.server import serve_folder
from ddp_slurm.data.token import find_or_make_token, find_token
from tests.data_sets import TOKEN, WRONG_TOKEN, DataServer, make_data_set

CLIENTS = 200
PIECES_OF_A_CLIENT = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataServer]:
    folder = tmp_path_factory.mktemp("served") / "set"
    make_data_set(folder)
    with DataServer(folder) as server:
        yield server
        assert server.stop() == 0


def status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def get(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request) as answer:
        content: bytes = answer.read()
    return content


def test_server_sends_files_and_ranges(served: DataServer) -> None:
    for name in ("train/large.bin", "train/a b#c%é.txt", "empty"):
        content = (served.folder / name).read_bytes()
        assert get(served.request(f"/files/{quote(name)}")) == content
    large = (served.folder / "train/large.bin").read_bytes()
    asked = served.request("/files/train/large.bin", Range="bytes=1000-1999")
    assert get(asked) == large[1000:2000]


def test_server_lists_the_files_for_a_browser(served: DataServer) -> None:
    password = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    request = served.request("/", None, Authorization=f"Basic {password}")
    page = get(request).decode()
    assert 'href="/files/train/a%20b%23c%25%C3%A9.txt">train/a b#c%é.txt<' in page


def test_files_are_never_shown_as_pages(served: DataServer) -> None:
    with urllib.request.urlopen(served.request("/files/page.html")) as answer:
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/", "/manifest", "/files/empty", "/pieces/0", "/none"])
@pytest.mark.parametrize("token", [None, WRONG_TOKEN, "", TOKEN[:-1], "\xff"])
def test_server_refuses_a_wrong_token(served: DataServer, path: str, token: str | None) -> None:
    assert status_of(served.request(path, token)) == 401


@pytest.mark.parametrize(
    "path",
    [
        "/files/../secret",
        "/files/%2e%2e/secret",
        "/files/..%2fsecret",
        "/files//etc/hostname",
        "/files/train/../../secret",
        "/files/.ddp-slurm-manifest.json",
        "/files/train",
        "/pieces/99999",
        "/pieces/-1",
    ],
)
def test_server_refuses_a_path_that_is_not_listed(served: DataServer, path: str) -> None:
    (served.folder.parent / "secret").write_text("secret")
    connection = http.client.HTTPConnection("127.0.0.1", served.port)  # sends the path as it is
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    assert answer.status == 404
    assert b"secret\n" not in answer.read()
    connection.close()


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_server_is_read_only(served: DataServer, method: str) -> None:
    request = served.request("/files/empty")
    request.method = method
    assert status_of(request) == 405


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"id": 1}', "x" * 100])
def test_server_refuses_a_report_of_no_node(served: DataServer, body: str) -> None:
    request = served.request("/nodes")
    request.data = body.encode()
    assert status_of(request) == 400


def test_many_clients_at_once_lose_nothing(served: DataServer) -> None:
    manifest = Manifest.read(get(served.request("/manifest")), "server")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    begin = asyncio.Event()

    async def fetch_some(session: aiohttp.ClientSession, client: int) -> None:
        await begin.wait()
        for number in range(client, client + PIECES_OF_A_CLIENT):
            piece = number % len(manifest.pieces)
            checksum = manifest.pieces[piece]
            async with session.get(f"{served.url}/pieces/{piece}") as answer:
                assert hashlib.sha256(await answer.read()).hexdigest() == checksum

    async def all_clients() -> None:
        connector = aiohttp.TCPConnector(limit=0)  # a connection for each
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            clients = [
                asyncio.create_task(fetch_some(session, client)) for client in range(CLIENTS)
            ]
            begin.set()
            await asyncio.gather(*clients)

    asyncio.run(all_clients())


def test_a_changed_file_is_refused_not_sent(served: DataServer) -> None:
    path = served.folder / "small/0"
    before = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")
    assert status_of(served.request("/files/small/0")) == 410
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert status_of(served.request("/files/small/0")) == 200


def test_a_link_made_while_serving_leads_nowhere(served: DataServer) -> None:
    path = served.folder / "small/1"
    outside = served.folder.parent / "outside"
    shutil.copy2(path, outside)  # with the same size and time
    path.rename(served.folder.parent / "kept")
    path.symlink_to(outside)
    assert status_of(served.request("/files/small/1")) == 410
    path.unlink()
    (served.folder.parent / "kept").rename(path)
    (served.folder / "small").rename(served.folder.parent / "moved")
    (served.folder / "small").symlink_to(served.folder.parent / "moved")
    assert status_of(served.request("/files/small/1")) == 410
    (served.folder / "small").unlink()
    (served.folder.parent / "moved").rename(served.folder / "small")
    assert status_of(served.request("/files/small/1")) == 200


def test_token_file_is_made_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    token, where = find_or_make_token(path)
    assert where == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert find_token(path) == token
    path.chmod(0o640)
    with pytest.raises(DataSetError, match="other users can read the token"):
        find_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(DataSetError, match="expected a token") as raised:
        find_token(path)
    assert "short" not in str(raised.value)
    with pytest.raises(DataSetError, match="no token for the data set"):
        find_token(tmp_path / "none")


def test_token_file_of_another_user_is_refused(
    tmp_path: Path, second_user: tuple[str, int, int]
) -> None:
    path = tmp_path / "token"
    find_or_make_token(path)
    name, uid, gid = second_user
    os.chown(path, uid, gid)
    with pytest.raises(DataSetError, match=f"belongs to another user, {name}"):
        find_token(path)


@pytest.mark.parametrize("bind", ["", "8400", "host:", "host:0", "host:99999", ":8400", "a:b"])
def test_serve_refuses_a_bad_address(tmp_path: Path, bind: str) -> None:
    with pytest.raises(DataSetError, match="expected ADDRESS:PORT"):
        serve_folder(tmp_path, bind, None)
