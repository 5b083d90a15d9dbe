"""What a stranger's file or message may take: memory, disk and time have bounds that hold before anything is expanded."""

from __future__ import annotations

import csv
import gzip
import io
import os
import struct
import tarfile
import tomllib
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrts import data, files
from fedrts.comparison.results import csv_of
from fedrts.config import from_file
from fedrts.data import images, unpack
from fedrts.errors import InputError
from fedrts.report.model import Column, Mean, ReportTable
from fedrts.report.text import table_csv
from fedrts.runs.initial_weights import load_weights
from fedrts.sparse.mask import Mask
from fedrts.wire import positions
from fedrts.wire.errors import WireError
from fedrts.wire.fields import Frame, Indices
from fedrts.wire.fields.coded import read_positions
from fedrts.wire.packing import Reader, varint
from helping import layout_of

MEGABYTE = 2**20


def peak(call) -> int:
    """Bytes at most that `call` held at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- arrays -----------------------------------------------------------------------------------------------------------


def header(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def zeros_zipped(path: Path, members: dict[str, int], method: int = zipfile.ZIP_DEFLATED) -> None:
    """An .npz with arrays of so many zero bytes each."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, size in members.items():
            with archive.open(f"{name}.npy", "w") as file:
                file.write(header((size,)))
                for _ in range(size // MEGABYTE):
                    file.write(bytes(MEGABYTE))


@pytest.fixture
def small_limits(monkeypatch):
    """As if any file might expand to 1 MB, so that bombs can be small."""
    monkeypatch.setattr(files, "ALWAYS", MEGABYTE)


def test_an_npz_that_expands_a_thousandfold_is_refused_unread(tmp_path, small_limits):
    path = tmp_path / "bomb.npz"
    zeros_zipped(path, {"x": 40 * MEGABYTE, "y": MEGABYTE})
    assert path.stat().st_size < MEGABYTE / 4

    def load():
        with pytest.raises(InputError, match=r"bomb\.npz has .* bytes and expands to .* numpy\.savez, uncompressed"):
            data.load(f"npz:{path}")

    assert peak(load) < 4 * MEGABYTE


@pytest.mark.parametrize("shape", [(2**44,), (2**20, 2**20, 8), (10,)])
def test_an_npz_whose_header_claims_more_or_less_than_there_is(tmp_path, shape):
    """Terabytes, say: numpy allocates what the header says before it reads."""
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header(shape) + bytes(300))
        archive.writestr("y.npy", header((300,)) + bytes(300))
    with pytest.raises(InputError, match=r"huge\.npz: the header of x\.npy claims [\d,]+ bytes and 300 follow"):
        data.load(f"npz:{path}")


def test_a_bare_array_with_a_huge_header_is_one_line(tmp_path):
    path = tmp_path / "huge.npz"
    path.write_bytes(header((2**46,)) + bytes(300))
    with pytest.raises(InputError, match=r"huge\.npz is no \.npz file"):
        data.load(f"npz:{path}")


def test_memory_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "large.npz"
    np.savez(path, x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(np, "load", full)
    with pytest.raises(InputError, match=r"large\.npz do not fit into memory"):
        data.load(f"npz:{path}")


def test_the_limits_are_those_of_the_documentation():
    assert (files.most_expanded(2 * MEGABYTE), files.most_expanded(MEGABYTE * 1024)) == (256 * MEGABYTE, 100 * 1024 * MEGABYTE)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_honest_arrays_load(tmp_path, save):
    save(tmp_path / "own.npz", x=np.zeros((400, 28, 28), np.uint8), y=np.arange(400) % 4)
    assert data.load(f"npz:{tmp_path / 'own.npz'}").classes == 4


# -- archives ---------------------------------------------------------------------------------------------------------


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path, small_limits):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(20 * MEGABYTE))
    with pytest.raises(InputError, match=r"bomb\.zip is not safe to unpack: it expands"):
        unpack.unpack(tmp_path / "bomb.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_tar_bomb_is_stopped_at_the_limit(tmp_path, small_limits, suffix):
    mode: Any = f"w:{suffix}"
    with tarfile.open(tmp_path / "bomb.tar", mode) as archive:
        member = tarfile.TarInfo("zeros")
        member.size = 30 * MEGABYTE
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(InputError, match=r"bomb\.tar is not safe to unpack: it expands"):
        unpack.unpack(tmp_path / "bomb.tar", tmp_path / "out")
    written = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert written <= files.most_expanded((tmp_path / "bomb.tar").stat().st_size)


def test_a_tar_whose_header_is_the_bomb(tmp_path, small_limits):
    """The name of a member may have any length, and is read into memory."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 64 * MEGABYTE
    with gzip.open(tmp_path / "bomb.tar.gz", "wb") as file:
        file.write(member.tobuf())
        for _ in range(64):
            file.write(bytes(MEGABYTE))

    def take():
        with pytest.raises(InputError, match="expands to more than"):
            unpack.unpack(tmp_path / "bomb.tar.gz", tmp_path / "out")

    assert peak(take) < 20 * MEGABYTE


def test_an_archive_of_countless_entries_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "MEMBERS", 50)
    with tarfile.open(tmp_path / "many.tar.gz", "w:gz") as archive:
        for number in range(60):
            archive.addfile(tarfile.TarInfo(f"{number}"))
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as zipped:
        for number in range(60):
            zipped.writestr(f"{number}", b"")
    for name in ("many.tar.gz", "many.zip"):
        with pytest.raises(InputError, match="more than 50 entries"):
            unpack.unpack(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.bz2", "tar.xz", "tar", "zip"])
def test_honest_archives_are_unpacked(tmp_path, suffix):
    content = np.random.default_rng(0).bytes(300_000)
    path = tmp_path / f"own.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/b", content)
    else:
        mode: Any = f"w:{suffix[4:]}"
        with tarfile.open(path, mode) as tar:
            member = tarfile.TarInfo("a/b")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    unpack.unpack(path, tmp_path / "out")
    assert (tmp_path / "out" / "a" / "b").read_bytes() == content


def test_a_gzip_bomb_among_the_files_of_a_data_set(tmp_path, small_limits):
    from fedrts.data import fashion_mnist

    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(40):
            file.write(bytes(MEGABYTE))
    with pytest.raises(InputError, match="expands to"):
        fashion_mnist._idx(path, (28, 28))


# -- images -----------------------------------------------------------------------------------------------------------


def png(path: Path, width: int, height: int) -> None:
    """A file that claims so many pixels and has none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b""))


@pytest.mark.parametrize("side", [8_500, 10_000, 12_000, 60_000])
def test_an_image_of_too_many_pixels_is_refused_undecoded(tmp_path, side):
    """From 89 million on Pillow warns, from 179 million it refuses."""
    pytest.importorskip("PIL")
    png(tmp_path / "large.png", side, side)

    def look():
        with pytest.raises(InputError, match=r"large\.png (has .* pixels, more than|is no readable image: Image size .* exceeds)"):
            images.size_of(str(tmp_path / "large.png"))

    assert peak(look) < 4 * MEGABYTE


@pytest.mark.parametrize("name", ["half.png", "half.jpg"])
def test_a_truncated_image_is_one_line(tmp_path, name):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=rf"{name} is no readable image"):
        images.size_of(str(tmp_path / name))


def test_a_file_of_another_format_is_not_decoded_whatever_its_name(tmp_path):
    """Pillow would hand an EPS file to Ghostscript."""
    pytest.importorskip("PIL")
    (tmp_path / "picture.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(InputError, match=r"picture\.png is no readable image: cannot identify"):
        images.size_of(str(tmp_path / "picture.png"))


# -- pipes, sockets, devices ------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.png")
    return tmp_path / "pipe.png"


@pytest.mark.timeout(110, method="thread")  # an open of a pipe cannot be interrupted everywhere
@pytest.mark.parametrize(
    "read",
    [
        from_file,
        lambda path: data.load(f"npz:{path}"),
        lambda path: load_weights(torch.nn.Linear(2, 2), path),
        lambda path: images.listed(path.parent),
        lambda path: unpack.unpack(path, path.with_name("out")),
    ],
    ids=["experiment", "npz", "init", "images", "archive"],
)
def test_a_pipe_is_refused_and_nobody_waits(pipe, read):
    with pytest.raises(InputError, match=r"pipe\.png is a pipe, not a plain file"):
        read(pipe)


@pytest.mark.timeout(110, method="thread")  # an open of a pipe cannot be interrupted everywhere
@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("inspect", "history.jsonl"),
        ("report", "history.jsonl"),
        ("resume", "topology.jsonl"),
        ("evaluate", "experiment.toml"),
        ("inspect", "summary.json"),
    ],
)
def test_a_pipe_in_a_run_folder_is_refused(finished, command, word, name):
    (finished / name).unlink()
    os.mkfifo(finished / name)
    ended = command(word, finished)
    assert (ended.code, f"{name} is a pipe" in ended.err) == (2, True)


@pytest.mark.timeout(110, method="thread")  # an open of a pipe cannot be interrupted everywhere
def test_a_pipe_among_the_files_of_a_data_set_is_refused(tmp_path, command):
    from fedrts.data.fashion_mnist import SOURCE

    for path in SOURCE.needed:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / path)
    with pytest.raises(InputError, match="is a pipe"):
        data.load("fashion_mnist", {}, tmp_path)
    ended = command("data", "prepare", "cifar10", "--from", tmp_path / SOURCE.needed[0], "--data-dir", tmp_path / "home")
    assert (ended.code, "is a pipe" in ended.err) == (2, True)


def test_a_device_is_refused():
    with pytest.raises(InputError, match=r"/dev/null is a device"):
        from_file("/dev/null")


# -- dependencies -----------------------------------------------------------------------------------------------------

MENDED = {
    "jinja2": (3, 1, 6),  # CVE-2025-27516: out of the sandbox
    "pillow": (11, 3),  # CVE-2025-48379: a write beyond a buffer; CVE-2024-28219 before
    "scikit-learn": (1, 5),  # CVE-2024-5206: training data kept in a vectoriser
    "torch": (2, 6),  # CVE-2025-32434: code run by torch.load(weights_only=True)
    "transformers": (4, 53),  # CVE-2025-6921, -6638 and others: regular expressions that never end; pickles before 4.48
    "cryptography": (44, 0, 1),  # CVE-2024-12797: an OpenSSL that does not notice a failed handshake
    "onnx": (1, 17),  # CVE-2024-7776, -5187: archives that write elsewhere
}
"""The first versions without holes that were known when this was written."""


@pytest.mark.parametrize("name", MENDED)
def test_versions_with_known_holes_are_not_installed(name):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(entry for extra in project["optional-dependencies"].values() for entry in extra)]
    (bound,) = {entry.partition(">=")[2].partition(",")[0] for entry in wanted if entry.partition(">=")[0] == name}
    assert tuple(map(int, bound.split("."))) >= MENDED[name]


# -- spreadsheets -----------------------------------------------------------------------------------------------------

FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "=HYPERLINK(0)", "\t=1", "-pkg.module:Method"]


def cells(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_cell_of_a_csv_file_is_a_formula(formula):
    compared = cells(csv_of([{"cell": formula, formula: 1.0, "loss": -0.5}]))
    table = ReportTable("t", "t", "t", [Column("setting"), Column(formula, "number")], [[formula, Mean(-0.25, 0.5)]])
    for row in [*compared, *cells(table_csv(table))]:
        assert not [cell for cell in row if cell.startswith(("=", "+", "@", "\t")) or (cell.startswith("-") and not is_number(cell))]


def is_number(cell: str) -> bool:
    try:
        return float(cell) <= 0
    except ValueError:
        return False


def test_negative_numbers_stay_numbers():
    assert cells(csv_of([{"a": -0.5, "b": -3, "c": "-1e-3", "d": None, "e": "fedrts"}]))[1] == ["-0.5", "-3", "-1e-3", "", "fedrts"]


# -- messages ---------------------------------------------------------------------------------------------------------

LINKS = 2**19
SHAPES = [(LINKS,), (1, LINKS), (LINKS, 1), (LINKS // 2, 2), (2, LINKS // 2), (1024, LINKS // 1024)]
FEW = 6
"""Decoding positions takes at most so many bytes for each byte of the message and each link of the layer."""


def draws() -> list[np.ndarray]:
    """Masks of several densities, some with a gap that needs wide numbers, and what they leave out."""
    rng = np.random.default_rng(0)
    found = [np.zeros(LINKS, np.bool_)]
    for density in (1e-5, 0.2, 0.4, 0.5):
        for gap in (0, 70_000):
            bits = rng.random(LINKS) < density
            bits[:gap] = False
            found += [bits, ~bits]
    return found


def test_decoding_positions_takes_a_few_times_what_it_is_about():
    """Whatever coding a sender chose: rows and columns of a vector took 28 times as much."""
    worst = 0.0
    for bits in draws():
        for shape in SHAPES if bits.sum() in (0, LINKS) or bits.mean() > 0.49 else SHAPES[-2:]:
            for coding in positions.Coding:
                try:
                    _, payload = positions.encode(bits, shape, coding)
                except ValueError:  # not every coding can say everything
                    continue
                message = bytes([coding]) + varint(len(payload)) + payload

                def read(message=message, shape=shape):
                    try:
                        read_positions(Reader(message), shape)
                    except WireError:
                        assert len(message) > LINKS // 8  # longer than a bitmap: nobody who chooses the smallest sends it

                worst = max(worst, peak(read) / (LINKS + len(message)))
    assert worst < FEW


def test_a_coding_that_is_longer_than_a_bitmap_is_refused_unread():
    bits = np.ones(LINKS, np.bool_)
    for coding in (positions.Coding.COORDINATE, positions.Coding.CSR):
        _, payload = positions.encode(bits, (LINKS,), coding)
        message = bytes([coding]) + varint(len(payload)) + payload

        def refuse(message=message):
            with pytest.raises(WireError):
                read_positions(Reader(message), (LINKS,))

        assert peak(refuse) < MEGABYTE / 4


def test_a_claimed_count_allocates_nothing():
    """Bytes that claim every link and bring none."""
    for coding in (positions.Coding.COORDINATE, positions.Coding.CSR, positions.Coding.CSC, positions.Coding.GAP):
        for tail in (b"", b"\x00", b"\x00" * 50):
            payload = varint(LINKS // 2) + tail

            def refuse(payload=payload, coding=coding):
                with pytest.raises(WireError):
                    read_positions(Reader(bytes([coding]) + varint(len(payload)) + payload), SHAPES[-1])

            assert peak(refuse) < MEGABYTE / 4


def test_a_whole_field_of_votes_takes_a_few_times_the_model():
    mask = Mask(torch.arange(LINKS) % 5 == 0, (LINKS,))
    frame = Frame(layout_of(mask), mask)
    field = Indices("gradient", [LINKS // 10])
    selection = field.take({"gradient": torch.rand(LINKS)}, frame)
    message = b"".join(field.write(selection, frame))
    assert peak(lambda: field.read(Reader(message), frame)) < FEW * (LINKS + len(message))
