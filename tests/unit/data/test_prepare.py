"""Preparing data sets over a real HTTP server on the loopback interface."""

import dataclasses
import hashlib
import http.server
import io
import shutil
import socket
import tarfile
import threading
import zipfile

import pytest

import official
from fedrts import data
from fedrts.data.download import download
from fedrts.data.prepare import prepare
from fedrts.data.unpack import unpack
from fedrts.errors import InputError
from helping import source_of


def chunks(body, ended):
    parts = [body[start : start + 1000] for start in range(0, len(body), 1000)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n" * ended


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, as well or as badly as the rest says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges, self.sizes, self.chunked, self.breaks_after = True, True, False, 1 << 40
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server = self.server
        name = self.path.strip("/")
        server.requests.append((name, self.headers.get("Range")))
        if name not in server.files:
            self.send_error(404)
            return
        content, start = server.files[name], 0
        if server.ranges and self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.sizes:
            self.send_header("Content-Length", str(len(content) - start))
        if server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        body = content[start : start + server.breaks_after]
        self.wfile.write(chunks(body, ended=len(body) == len(content) - start) if server.chunked else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    httpd = Server()
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def quiet(*_):
    pass


CONTENT = bytes(range(256)) * 40
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


def test_a_download_reports_progress_and_is_complete(server, tmp_path):
    server.files["a.bin"] = CONTENT
    seen = []
    download(f"{server.url}/a.bin", tmp_path / "new" / "a.bin", MD5, lambda *told: seen.append(told))
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert seen[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["a.bin"]


def test_a_partial_download_goes_on_where_it_broke_off(server, tmp_path):
    server.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, quiet)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requests == [("a.bin", "bytes=1000-")]


def test_a_complete_part_needs_only_its_check(server, tmp_path):
    server.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, quiet)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.files["a.bin"], server.ranges = CONTENT, False
    (tmp_path / "a.bin.part").write_bytes(b"something else")
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, quiet)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_transfer_that_breaks_off_is_taken_up_again(server, tmp_path):
    server.files["a.bin"], server.breaks_after = CONTENT, 4000
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, quiet)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=4000-", "bytes=8000-"]


def test_a_transfer_that_never_ends_keeps_what_came(server, tmp_path):
    server.files["a.bin"], server.breaks_after = CONTENT, 1000
    with pytest.raises(InputError, match="broke off at 3,000 of 10,240 bytes: run it again"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", None, quiet)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:3000]
    assert not (tmp_path / "a.bin").exists()


def test_chunks_of_unknown_number_are_a_whole_only_with_the_last(server, tmp_path):
    server.files["a.bin"], server.sizes, server.chunked = CONTENT, False, True
    download(f"{server.url}/a.bin", tmp_path / "a.bin", None, quiet)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    server.breaks_after = 4000
    download(f"{server.url}/a.bin", tmp_path / "b.bin", None, quiet)
    assert (tmp_path / "b.bin").read_bytes() == CONTENT
    server.ranges = False
    with pytest.raises(InputError, match=r"a\.bin broke off at 4,000 bytes: run it again"):
        download(f"{server.url}/a.bin", tmp_path / "c.bin", None, quiet)
    assert not (tmp_path / "c.bin").exists()


@pytest.mark.parametrize("sizes", [True, False])
def test_a_wrong_checksum_is_refused_and_not_gone_on_from(server, tmp_path, sizes):
    server.files["a.bin"], server.sizes = CONTENT[:-1] + b"x", sizes
    with pytest.raises(InputError, match="is damaged or another file: its md5 is") as caught:
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, quiet)
    assert MD5.removeprefix("md5:") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_address_that_is_gone_or_out_of_reach_is_one_line(server, tmp_path):
    with pytest.raises(InputError, match="answered 404"):
        download(f"{server.url}/none", tmp_path / "none", None, quiet)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/a.bin"
    with pytest.raises(InputError, match=r"cannot download .*a\.bin: .*refused.*--from PATH"):
        download(closed, tmp_path / "a.bin", None, quiet)


# -- archives -------------------------------------------------------------------------------------------------------


def tar_of(*members, target):
    with tarfile.open(target, "w:gz") as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            tar.addfile(info, io.BytesIO(content))
    return target


UNSAFE = [("/etc/x", tarfile.REGTYPE), ("a/../../x", tarfile.REGTYPE), ("..", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)]
UNSAFE += [("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE), ("dev", tarfile.CHRTYPE)]


@pytest.mark.parametrize(("name", "kind"), UNSAFE)
def test_a_tar_with_paths_out_or_links_is_refused(tmp_path, name, kind):
    content = b"x" if kind == tarfile.REGTYPE else b""
    archive = tar_of(("fine.txt", b"ok", tarfile.REGTYPE), (name, content, kind), target=tmp_path / "a.tar.gz")
    with pytest.raises(InputError, match="is not safe to unpack"):
        unpack(archive, tmp_path / "in" / "here")
    assert {entry.name for entry in tmp_path.rglob("*") if entry.is_file()} <= {"a.tar.gz", "fine.txt"}


@pytest.mark.parametrize("name", ["/x", "../x", "a\\..\\x", "LINK"])
def test_a_zip_with_paths_out_or_links_is_refused(tmp_path, name):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        info = zipfile.ZipInfo(name)
        info.external_attr = (0o120777 if name == "LINK" else 0o100644) << 16
        file.writestr(info, "/etc/passwd")
    with pytest.raises(InputError, match="is not safe to unpack"):
        unpack(archive, tmp_path / "in" / "here")


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"no archive", lambda whole: b""])
def test_a_damaged_archive_is_one_line(tmp_path, damage):
    archive = tar_of(("a.bin", CONTENT * 20, tarfile.REGTYPE), target=tmp_path / "a.tar.gz")
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(InputError, match=r"no complete \.zip or \.tar\.gz archive"):
        unpack(archive, tmp_path / "out")


# -- whole data sets ------------------------------------------------------------------------------------------------


def packed(name, folder, target):
    """The official archive of a tiny data set, and the data set itself under `folder`."""
    official.ALL[name](folder)
    inner = source_of(name).files[0].to
    if target.suffix == ".zip":
        shutil.make_archive(str(target.with_suffix("")), "zip", folder, inner)
    else:
        with tarfile.open(target, "w:gz") as tar:
            if name == "cinic10":  # its archive has no folder around the three
                tar.add(folder / inner, ".")
            else:
                tar.add(folder / inner, inner)
    return target


@pytest.fixture
def mirrored(server, tmp_path, monkeypatch):
    """`mirrored(name)` serves a tiny version of a data set at the addresses of its source, checksums included."""

    def serve(name):
        source, origin = source_of(name), tmp_path / "origin"
        origin.mkdir()
        if source.files[0].archive:
            packed(name, origin / "made", origin / source.files[0].name)
            found = {source.files[0].name: (origin / source.files[0].name).read_bytes()}
        else:
            official.ALL[name](origin / "made")
            found = {file.name: (origin / "made" / file.to).read_bytes() for file in source.files}
        server.files |= found

        def here(file):
            checksum = file.checksum and f"md5:{hashlib.md5(found[file.name]).hexdigest()}"
            return dataclasses.replace(file, url=f"{server.url}/{file.name}", checksum=checksum)

        changed = dataclasses.replace(source, files=tuple(here(file) for file in source.files))
        monkeypatch.setattr(data.get(name), "source", changed)
        return origin

    return serve


@pytest.mark.parametrize("name", official.ALL)
def test_every_data_set_can_be_downloaded(name, mirrored, server, tmp_path):
    mirrored(name)
    home = tmp_path / "home"
    held = prepare(name, home, None, quiet)
    assert len(held.x)
    asked = len(server.requests)
    assert asked == len(source_of(name).files)
    assert not (home / "downloads").exists() or not list((home / "downloads").iterdir()), "archives go when their content is in place"
    prepare(name, home, None, quiet)
    assert len(server.requests) == asked, "what is there is not downloaded again"


@pytest.mark.parametrize("name", official.ALL)
def test_every_data_set_can_come_from_a_folder(name, tmp_path):
    official.ALL[name](tmp_path / "given")
    for number, given in enumerate((tmp_path / "given", *(tmp_path / "given").iterdir())):
        if name == "tinystories" and number:
            continue  # its files lie in two folders
        held = prepare(name, tmp_path / f"home{number}", given, quiet)
        assert len(held.x)


@pytest.mark.parametrize("name", ["cifar10", "tinyimagenet", "cinic10"])
def test_an_archive_that_is_here_already(name, mirrored, server, tmp_path):
    origin = mirrored(name)
    archive = origin / source_of(name).files[0].name
    assert len(prepare(name, tmp_path / "home", archive, quiet).x)
    assert server.requests == []
    assert archive.exists()
    archive.write_bytes(archive.read_bytes()[:-9])
    with pytest.raises(InputError, match="is damaged or another file: its md5"):
        prepare(name, tmp_path / "other", archive, quiet)
    assert not list((tmp_path / "other").glob("[!.]*")) if (tmp_path / "other").exists() else True


def test_files_one_by_one(mirrored, tmp_path):
    origin = mirrored("svhn") / "made" / "svhn"
    home = tmp_path / "home"
    with pytest.raises(InputError, match=r"train_32x32\.mat does not hold all of 'svhn': it has no test_32x32\.mat; give"):
        prepare("svhn", home, origin / "train_32x32.mat", quiet)
    assert len(prepare("svhn", home, origin / "test_32x32.mat", quiet).x) == 12


def test_a_damaged_folder_leaves_nothing(tmp_path):
    official.cifar10(tmp_path / "given")
    batch = tmp_path / "given" / "cifar-10-batches-bin" / "data_batch_4.bin"
    batch.write_bytes(batch.read_bytes()[:-1])
    with pytest.raises(InputError, match="no whole number of images"):
        prepare("cifar10", tmp_path / "home", tmp_path / "given", quiet)
    assert not (tmp_path / "home" / "cifar-10-batches-bin").exists()
    assert batch.exists(), "what was given stays"


def test_an_archive_of_something_else(mirrored, tmp_path, monkeypatch):
    mirrored("cifar10")
    other = tar_of(("readme.txt", b"hello", tarfile.REGTYPE), target=tmp_path / "other.tar.gz")
    (tmp_path / "elsewhere").mkdir()
    source = source_of("cifar10")
    file = dataclasses.replace(source.files[0], checksum=None)
    monkeypatch.setattr(data.get("cifar10"), "source", dataclasses.replace(source, files=(file,)))
    with pytest.raises(InputError, match=r"there is no data_batch_1\.bin"):
        prepare("cifar10", tmp_path / "home", other, quiet)
    with pytest.raises(InputError, match=r"there is no data_batch_1\.bin"):
        prepare("cifar10", tmp_path / "home", tmp_path / "elsewhere", quiet)
    assert not list((tmp_path / "home").glob("*cifar*"))


def test_what_needs_no_preparation_and_what_is_not_there(tmp_path):
    with pytest.raises(InputError, match="'digits' needs no preparation"):
        prepare("digits", tmp_path, None, quiet)
    with pytest.raises(InputError, match="there is no"):
        prepare("cifar10", tmp_path, tmp_path / "none.tar.gz", quiet)


def test_a_bad_archive_among_the_downloads_is_fetched_again(mirrored, server, tmp_path):
    mirrored("cifar10")
    home = tmp_path / "home"
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / source_of("cifar10").files[0].name).write_bytes(b"not an archive")
    assert len(prepare("cifar10", home, None, quiet).x)
    assert len(server.requests) == 1
