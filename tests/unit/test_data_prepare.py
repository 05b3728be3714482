"""``ddp-slurm data prepare`` and ``check``: downloads, archives, manifests."""

import asyncio
import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ddp_slurm.data import folder as folders
from ddp_slurm.data.commands import check
from ddp_slurm.data.download import Checksum, download
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.manifest import KEPT_NAME, File, Manifest
from ddp_slurm.data.prepare import Source, prepare, source_of
from tests.data_sets import contents, make_data_set

CONTENT = bytes(range(256)) * 4000


def checksum_of(content: bytes) -> Checksum:
    return Checksum("sha256", hashlib.sha256(content).hexdigest())


class Publisher:
    """A server that breaks its first answers off, and notes the ranges that it was asked for."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.headers: dict[str, str] = {}
        self.breaks = 0
        self.knows_ranges = True
        self.ranges: list[str | None] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{port}/set.bin?version=1"

    async def _listen(self) -> int:
        app = web.Application()
        app.add_routes([web.get("/set.bin", self._answer)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range"))
        begin = (request.http_range.start or 0) if self.knows_ranges else 0
        part = self.content[begin:]
        if begin and not part:
            return web.Response(status=416)
        response = web.StreamResponse(status=206 if begin else 200, headers=self.headers)
        response.content_length = len(part)
        await response.prepare(request)
        if self.breaks:
            self.breaks -= 1
            await response.write(part[: len(part) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(part)
        return response

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    publisher.start()
    yield publisher
    publisher.stop()


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_download_goes_on_after_a_break(
    publisher: Publisher, tmp_path: Path, *, knows_ranges: bool
) -> None:
    publisher.breaks, publisher.knows_ranges = 1, knows_ranges
    target = tmp_path / "set.bin"
    download(publisher.url, target, checksum_of(CONTENT))
    assert target.read_bytes() == CONTENT
    assert publisher.ranges[0] is None
    assert all(asked is not None for asked in publisher.ranges[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin"]


def test_download_keeps_an_archive_compressed(publisher: Publisher, tmp_path: Path) -> None:
    """Some servers call the gzip of a .tar.gz the encoding of the answer (Apache's AddEncoding)."""
    publisher.content = gzip.compress(CONTENT)
    publisher.headers = {"Content-Encoding": "gzip"}
    download(publisher.url, tmp_path / "set.gz", checksum_of(publisher.content))
    assert (tmp_path / "set.gz").read_bytes() == publisher.content


def test_download_starts_again_after_a_wrong_beginning(
    publisher: Publisher, tmp_path: Path
) -> None:
    (tmp_path / "set.bin.partial").write_bytes(b"of an older version")
    download(publisher.url, tmp_path / "set.bin", checksum_of(CONTENT))
    assert (tmp_path / "set.bin").read_bytes() == CONTENT


def test_download_with_a_wrong_checksum_leaves_nothing(
    publisher: Publisher, tmp_path: Path
) -> None:
    with pytest.raises(DataSetError, match=r"its checksum is sha256:.*, expected sha256:"):
        download(publisher.url, tmp_path / "set.bin", checksum_of(b"other"))
    assert not list(tmp_path.iterdir())


def test_download_names_the_answer_of_the_server(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(DataSetError, match="the server's answer is 404"):
        download(publisher.url.replace("set", "no"), tmp_path / "x", checksum_of(CONTENT))


def test_prepare_keeps_a_plain_file_under_its_name(publisher: Publisher, tmp_path: Path) -> None:
    prepare(source_of(publisher.url, checksum_of(CONTENT)), tmp_path / "set")
    assert contents(tmp_path / "set") == {"set.bin": CONTENT}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".set.lock", "set"]


def archive_of(folder: Path, kind: str) -> Path:
    archive = folder.with_suffix(f".{kind}")
    files = [path for path in folder.rglob("*") if path.is_file()]
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            for path in files:
                zipped.write(path, path.relative_to(folder))
    else:
        with tarfile.open(archive, "w:gz") as tar:
            for path in files:
                tar.add(path, path.relative_to(folder))
    return archive


@pytest.fixture(params=["this Python", "Debian 12's"])
def tar_filter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tarfile's filters, and without them as before 3.10.12 and 3.11.4."""
    if request.param != "this Python":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.mark.usefixtures("tar_filter")
@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_prepare_unpacks_an_archive_once(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = make_data_set(tmp_path / "source", kilobytes=600)
    archive = archive_of(tmp_path / "source", kind)
    source = source_of(str(archive), None)
    prepare(source, tmp_path / "set")
    assert contents(tmp_path / "set") == files
    assert archive.exists()
    prepare(source, tmp_path / "set")
    assert "already complete" in capsys.readouterr().err


def test_prepare_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    make_data_set(tmp_path / "source", kilobytes=1)
    source = source_of(str(archive_of(tmp_path / "source", "zip")), None)
    with pytest.raises(DataSetError, match="was not made by data prepare"):
        prepare(source, tmp_path / "source")
    prepare(source, tmp_path / "set")
    (tmp_path / "set" / "empty").write_text("no longer")
    with pytest.raises(DataSetError, match="was changed or removed after data prepare"):
        prepare(source, tmp_path / "set")


@pytest.mark.usefixtures("tar_filter")
@pytest.mark.parametrize("name", ["../out", "/absolute", "link"])
def test_prepare_refuses_an_archive_that_leads_outside(tmp_path: Path, name: str) -> None:
    if name == "/absolute":
        name = str(tmp_path / "absolute")
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member, io.BytesIO())
    folder = tmp_path / "deep" / "set"
    if name.startswith("/"):  # tar's own rule: the slash is dropped
        prepare(Source(str(tmp_path / "evil.tar"), None), folder)
        assert list(contents(folder)) == [name[1:]]
    else:
        with pytest.raises(DataSetError, match="cannot be unpacked"):
            prepare(Source(str(tmp_path / "evil.tar"), None), folder)
        assert not folder.exists()
    assert not (tmp_path / "absolute").exists()
    assert not (tmp_path / "deep" / "out").exists()


@pytest.mark.parametrize(
    ("name", "checksum", "words"),
    [
        ("https://example.org/x.tgz", None, "give its checksum"),
        ("cifar10", checksum_of(b""), "which has its own"),
        ("cifar", None, "did you mean 'cifar10'"),
        ("/no/such/file", None, "is neither a file"),
    ],
)
def test_prepare_refuses_a_source_it_cannot_check(
    name: str, checksum: Checksum | None, words: str
) -> None:
    with pytest.raises(DataSetError, match=words):
        source_of(name, checksum)


@pytest.mark.parametrize("text", ["", "md5:12", "crc:" + "0" * 64, "sha256:" + "g" * 64])
def test_checksum_refuses_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a checksum"):
        Checksum.read(text)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), piece_bytes=st.integers(1, 25))
def test_spans_of_all_pieces_cover_each_byte_once(sizes: list[int], piece_bytes: int) -> None:
    files = tuple(File(f"{number}", size) for number, size in enumerate(sizes))
    count = -(-sum(sizes) // piece_bytes)
    manifest = Manifest(files, piece_bytes, ("0" * 64,) * count)
    covered = [
        (span.file, span.offset + byte)
        for piece in range(count)
        for span in manifest.spans(piece)
        for byte in range(span.length)
    ]
    assert covered == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    for index in range(len(sizes)):
        with_bytes = [
            piece for piece in range(count) if index in {s.file for s in manifest.spans(piece)}
        ]
        assert list(manifest.pieces_of(index)) == with_bytes


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", "a/../../x", "a//b", ".", "", "a\n", "\x1b[2J", KEPT_NAME]
)
def test_manifest_refuses_a_path_outside_the_folder(path: str) -> None:
    manifest = Manifest((File(path, 0),), 1, ())
    with pytest.raises(DataSetError, match="the path"):
        Manifest.read(manifest.text, "here")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"format":1,"files":[["a",-1]],"pieces":[]}']
)
def test_manifest_refuses_other_texts(text: str) -> None:
    with pytest.raises(DataSetError, match="here: not a manifest"):
        Manifest.read(text, "here")


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    inside = tmp_path / "set"
    make_data_set(inside, kilobytes=1)
    (inside / "link").symlink_to("page.html")
    assert "link" in [file.path for file in folders.find_files(inside)]
    (inside / "out").symlink_to("/etc/hostname")
    with pytest.raises(DataSetError, match="out: is a link that leaves"):
        folders.find_files(inside)
    (inside / "out").unlink()
    (inside / "out").symlink_to("train")
    with pytest.raises(DataSetError, match="is neither a file"):
        folders.find_files(inside)


def test_check_finds_a_flipped_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_data_set(tmp_path, kilobytes=600)
    kept, _ = folders.find_or_make(tmp_path, lambda count: None)
    folders.keep(kept, tmp_path)
    check(folder=tmp_path)
    with (tmp_path / "train/large.bin").open("r+b") as file:
        file.seek(300_000)
        byte = file.read(1)
        file.seek(300_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(SystemExit) as ended:
        check(folder=tmp_path)
    assert ended.value.code == 1
    assert "train/large.bin: has bytes that differ" in capsys.readouterr().err


def test_a_changed_folder_gets_a_new_manifest(tmp_path: Path) -> None:
    make_data_set(tmp_path, kilobytes=1)
    kept, is_new = folders.find_or_make(tmp_path, lambda count: None)
    folders.keep(kept, tmp_path)
    assert is_new
    assert not folders.find_or_make(tmp_path, lambda count: None)[1]
    (tmp_path / "one more").write_text("x")
    changed, is_new = folders.find_or_make(tmp_path, lambda count: None)
    assert is_new
    assert changed.manifest.digest != kept.manifest.digest
