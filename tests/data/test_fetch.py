"""``fsmap data get``: sources, formats, packages, checksums, bounds, and nothing half-written."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
import zipfile
from unittest.mock import Mock

import numpy as np
import pandas
import pytest

from fsmap.data import catalogue, fetch
from fsmap.data.catalogue import DataFile, DataSet, Download, Package, find
from fsmap.data.fetch import convert
from fsmap.errors import InputError, MissingDataError, MissingExtraError

CSV = b"a,b\n1,0.25\n-3,1e-07\n"
SPACED = b"  1.0000e+00   2.5e-1\n -3 1e-7 \n\n"
NOTE = b"a note"
URL = "http://source/table.txt"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


TABLE = DataFile("toy/table.csv", sha(CSV), len(CSV))
TEXT = DataFile("toy/note.txt", sha(NOTE), len(NOTE))
DOWNLOAD = Download(URL, TABLE.path, "space", header="a b")
ENTRY = DataSet("toy", "a toy", (TABLE,), "http://source", (DOWNLOAD,))


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"folder/{name}", content)
    return stream.getvalue()


@pytest.fixture
def toy(monkeypatch, no_data):
    """A catalogue with one set, and empty folders to look into."""
    monkeypatch.setattr(fetch, "find", lambda _: ENTRY)
    return no_data


@pytest.fixture
def source(monkeypatch):
    """Set what the official source sends; nothing: it cannot be reached."""

    def send(content: bytes | None) -> None:
        lost = fetch.UnreachableError("no network") if content is None else None
        monkeypatch.setattr(fetch, "read_url", Mock(return_value=content, side_effect=lost))

    send(None)
    return send


def names(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("into", [None, "mine"])
def test_from_the_official_source(toy, source, into):
    source(SPACED)
    notes = []
    found = fetch.get("toy", into, say=notes.append)["table.csv"]
    assert found == (toy / "xdg" / "fsmap" if into is None else catalogue.Path("mine")) / TABLE.path
    assert found.read_bytes() == CSV
    assert notes == [f"toy: downloading {URL}"]
    source(None)
    assert fetch.get("toy", into)["table.csv"] == found  # not fetched again


def test_another_content_is_refused_and_nothing_changes(toy, source):
    old = toy / "mine" / "toy" / "table.csv"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"damaged")
    source(b"1 3\n")
    with pytest.raises(MissingDataError, match="It was not kept"):
        fetch.get("toy", toy / "mine")
    assert old.read_bytes() == b"damaged"
    assert names(toy) == {"table.csv"}
    source(SPACED)
    fetch.get("toy", toy / "mine")
    assert old.read_bytes() == CSV


def test_what_cannot_be_had(toy, source, monkeypatch):
    with pytest.raises(MissingDataError, match="no network"):
        fetch.get("toy")
    by_hand = find("cifar100")
    monkeypatch.setattr(fetch, "find", lambda _: by_hand)
    monkeypatch.setattr(fetch, "look_for", lambda file, _: catalogue.Found(file, None))
    with pytest.raises(MissingDataError, match="cannot be fetched by a program"):
        fetch.get("cifar100")


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (SPACED, {}),
        (b'"x","y"\n1.0,0.250\n-3,0.0000001\n', {"kind": "comma"}),
        (b"y,z,x\n0.25,9,1\n1e-7,9,-3\n", {"kind": "comma", "columns": (2, 0)}),
        (b"x;y\r\n1;.25\r\n-3.0;1E-7\r\n", {"kind": "semicolon"}),
        (zipped(data=SPACED, other=b"x"), {"member": "data"}),
        (CSV, {"kind": "copy"}),
        (gzip.compress(CSV), {"kind": "gunzip"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_every_format_becomes_the_same_file(raw, changes):
    assert convert(raw, DOWNLOAD._replace(**changes)) == CSV


def test_rows_on_two_lines():
    rows = b" 1 2 3 4 5 6 7 8 9 10 11\n  12 13 14.5\n"
    recipe = Download("u", "p", "statlib", header=" ".join("abcdefghijklmn"))
    made = convert(b"about houses\n" * 22 + rows, recipe)
    assert made.splitlines()[1] == b"1,2,3,4,5,6,7,8,9,10,11,12,13,14.5"


def test_excel_through_pandas(monkeypatch):
    sheet = pandas.DataFrame({"x": [1.0, -3.0, np.nan], "y": [0.25, 1e-7, np.nan], "z": np.nan})
    monkeypatch.setattr(pandas, "read_excel", lambda _: sheet)
    assert convert(b"", DOWNLOAD._replace(kind="excel")) == CSV
    lacking = ImportError("Missing optional dependency 'xlrd'.")
    monkeypatch.setattr(pandas, "read_excel", Mock(side_effect=lacking))
    with pytest.raises(MissingExtraError, match="xlrd"):
        convert(b"", DOWNLOAD._replace(kind="excel"))


@pytest.mark.parametrize(
    ("raw", "changes", "word"),
    [
        (b"moved\n", {}, "expected"),
        (zipped(other=b""), {"member": "data"}, "no data"),
        (b"no archive", {"member": "data"}, "expected"),
        (b"<!DOCTYPE html>", {"kind": "gunzip"}, "expected"),
        (zipped(data=b"0 0\n" * 1000), {"member": "data"}, "1,000 bytes"),
        (gzip.compress(b"0 0\n" * 1000), {"kind": "gunzip"}, "1,000 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_source_of_another_form_or_size(raw, changes, word):
    with pytest.raises(InputError, match=word):
        convert(raw, DOWNLOAD._replace(**changes), limit=1000)


class Slow(http.server.BaseHTTPRequestHandler):
    """Sends bytes without an end: as fast as they go, or one at a time."""

    def do_GET(self):
        self.send_response(200)
        if self.path == "/short":
            self.send_header("Content-Length", "100")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"x")
            while self.path != "/short":
                time.sleep(0.01 if self.path == "/slow" else 0.0)
                self.wfile.write(b"x" if self.path == "/slow" else b"x" * 10_000)
                self.wfile.flush()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


@pytest.mark.parametrize(
    ("path", "words"),
    [("fast", "more than 100,000 bytes"), ("slow", "too long"), ("short", "99 bytes")],
)
def test_a_download_has_an_end(server, monkeypatch, path, words):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.5)
    monkeypatch.setattr(fetch, "SLOWEST", 1e9)
    with pytest.raises(fetch.UnreachableError, match=words):
        fetch.read_url(f"{server}/{path}", 100_000)
    with pytest.raises(fetch.UnreachableError, match="cannot download http://127.0.0.1:9/x"):
        fetch.read_url("http://127.0.0.1:9/x", 10)


def shell(folder, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def npm(toy, source, monkeypatch):
    """A set with two files, and an ``npm`` that hands out the archive that is put in its place."""
    monkeypatch.setenv("PATH", str(toy / "bin"), prepend=":")
    script = f'test "$*" = "pack toy-data@1.0.0" && cp {toy}/toy-1.0.0.tgz .'
    shell(toy / "bin", "npm", script)

    def put(archive: bytes | list[tuple[tarfile.TarInfo, bytes]]) -> Package:
        if not isinstance(archive, bytes):
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w:gz") as tar:
                for info, content in archive:
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
            archive = stream.getvalue()
        (toy / "toy-1.0.0.tgz").write_bytes(archive)
        package = Package("npm", "toy-data", "1.0.0", sha(archive), "package")
        entry = ENTRY._replace(files=(TABLE, TEXT), package=package)
        monkeypatch.setattr(fetch, "find", lambda _: entry)
        return package

    return put


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


GOOD = [(member("package/table.csv"), CSV), (member("package/note.txt"), NOTE)]


@pytest.mark.parametrize("sent", [None, SPACED])
def test_a_package_delivers_what_the_source_does_not(npm, source, sent):
    npm(GOOD)
    source(sent)
    notes = []
    found = fetch.get("toy", say=notes.append)
    contents = {name: path.read_bytes() for name, path in found.items()}
    assert contents == {"table.csv": CSV, "note.txt": NOTE}
    assert notes[-1] == "toy: unpacking the npm package toy-data"


@pytest.mark.parametrize(
    ("archive", "script", "word"),
    [
        (GOOD, "echo 'code E404' >&2; exit 1", "E404"),
        (GOOD, "exit 0", "no archive came"),
        (GOOD[:1], None, "no file note.txt"),
        (b"no tar", None, "unpacked"),
        (b"\x1f\x8b damaged", None, "unpacked"),
        ([(member("package/table.csv"), b"another"), GOOD[1]], None, "not kept"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_package_that_fails(npm, toy, archive, script, word):
    npm(archive)
    if script:
        shell(toy / "bin", "npm", script)
    with pytest.raises(MissingDataError, match=word):
        fetch.get("toy", toy / "mine")


def test_an_archive_with_another_checksum_is_not_unpacked(npm, toy, monkeypatch):
    npm(GOOD)
    (toy / "toy-1.0.0.tgz").write_bytes(b"another archive")
    monkeypatch.setattr(fetch, "_unpack", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(MissingDataError, match="checksum"):
        fetch.get("toy", toy / "mine")
    assert not (toy / "mine").exists()


def test_without_the_registry_s_program(npm, monkeypatch):
    npm(GOOD)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDataError, match="installed"):
        fetch.get("toy")


HOSTILE = {
    "a way up": [(member("../../evil"), b"")],
    "an absolute path": [(member("OUTSIDE/evil"), b"")],
    "a link to a folder outside, and a file through it": [
        (member("package/up", tarfile.SYMTYPE, "OUTSIDE"), b""),
        (member("package/up/evil"), b""),
    ],
    **{
        link: [(member("package/table.csv", kind, "OUTSIDE/table.csv"), b""), GOOD[1]]
        for link, kind in (("a symbolic link", tarfile.SYMTYPE), ("a hard link", tarfile.LNKTYPE))
    },
    "a pipe": [(member("package/pipe", tarfile.FIFOTYPE), b""), *GOOD],
}
"""Archives with the right checksum and members that lead outside; OUTSIDE is a folder's path."""


@pytest.mark.parametrize("case", HOSTILE)
def test_an_archive_reads_and_writes_nothing_outside(npm, toy, monkeypatch, case):
    """Each fails without ``filter="data"``: a file appears outside, or one there is taken in."""
    outside, scratch = toy / "outside", toy / "scratch"
    for folder in (outside, scratch):
        folder.mkdir()
    (outside / "table.csv").write_bytes(CSV)  # what a link that is followed would bring in
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    members = []
    for info, content in HOSTILE[case]:
        name, link = (text.replace("OUTSIDE", str(outside)) for text in (info.name, info.linkname))
        members.append((member(name, info.type, link), content))
    npm(members)
    before = set(toy.rglob("*"))
    with pytest.raises(MissingDataError, match="no file" if "absolute" in case else "unpacked"):
        fetch.get("toy", toy / "mine")
    assert set(toy.rglob("*")) == before


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_debian_package(toy, source, monkeypatch):
    root = toy / "root"
    (root / "usr" / "share" / "toy").mkdir(parents=True)
    (root / "usr" / "share" / "toy" / "table.csv").write_bytes(CSV)
    (root / "DEBIAN").mkdir()
    control = "Package: toy-data\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: toy\n"
    (root / "DEBIAN" / "control").write_text(control)
    deb = toy / "toy-data_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(root), str(deb)], check=True, capture_output=True)
    shell(toy / "bin", "apt-get", f"cp {deb} .")
    monkeypatch.setenv("PATH", str(toy / "bin"), prepend=":")
    package = Package("debian", "toy-data", "1", sha(deb.read_bytes()), "usr/share/toy")
    monkeypatch.setattr(fetch, "find", lambda _: ENTRY._replace(package=package))
    assert fetch.get("toy")["table.csv"].read_bytes() == CSV
