"""The cache of decoded arrays: complete or absent, and never in the way."""

import os
import threading

import numpy as np
import pytest
import torch

from fedrts.data.cache import cached
from fedrts.errors import InputError, Note


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.bin"
    file.write_bytes(b"abc")
    return file


def filling(calls):
    def decode(make):
        calls.append(1)
        make("x", (3, 2), np.uint8)[:] = np.arange(6).reshape(3, 2)
        make("y", (3,), np.int64)[:] = 7

    return decode


def test_decoded_once_and_equal(tmp_path, source):
    calls: list[int] = []
    first, second = (cached(tmp_path, "name", [source], filling(calls)) for _ in range(2))
    assert len(calls) == 1
    for found in (first, second):
        assert found["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert (found["x"].dtype, found["y"].dtype) == (torch.uint8, torch.int64)


def test_what_is_written_to_the_arrays_does_not_reach_the_files(tmp_path, source):
    cached(tmp_path, "name", [source], filling([]))["x"].zero_()
    assert cached(tmp_path, "name", [source], filling([]))["x"].sum() == 15


@pytest.mark.parametrize(
    "change", [lambda f: f.write_bytes(b"abcd"), lambda f: os.utime(f, ns=(5, 5)), lambda f: f.rename(f.with_name("other"))]
)
def test_another_source_is_decoded_again(tmp_path, source, change):
    calls: list[int] = []
    cached(tmp_path, "name", [source], filling(calls))
    change(source)
    cached(tmp_path, "name", [next(tmp_path.glob("[so]*"))], filling(calls))
    assert len(calls) == 2
    assert len(list((tmp_path / ".cache").glob("name-*"))) == 1


def test_names_that_begin_alike_do_not_remove_each_other(tmp_path, source):
    calls: list[int] = []
    for name in ("name", "name-b", "name"):
        cached(tmp_path, name, [source], filling(calls))
    assert len(calls) == 2


def test_a_damaged_cache_is_made_anew(tmp_path, source):
    calls: list[int] = []
    cached(tmp_path, "name", [source], filling(calls))
    (file,) = (tmp_path / ".cache").glob("name-*/x.npy")
    file.write_bytes(file.read_bytes()[:-2])
    assert cached(tmp_path, "name", [source], filling(calls))["x"].sum() == 15
    assert len(calls) == 2


def test_a_decoder_that_fails_or_is_killed_leaves_nothing_that_counts(tmp_path, source):
    def breaks(make):
        make("x", (3, 2), np.uint8)[:] = 9
        raise InputError("damaged")

    with pytest.raises(InputError, match="damaged"):
        cached(tmp_path, "name", [source], breaks)
    leftover = tmp_path / ".cache" / ".name.tmp"  # as SIGKILL would leave it
    leftover.mkdir()
    (leftover / "z.npy").write_bytes(b"half")
    assert set(cached(tmp_path, "name", [source], filling([]))) == {"x", "y"}
    assert not leftover.exists()


def test_without_a_place_to_write_arrays_are_decoded_into_memory_with_a_word(tmp_path, source):
    (tmp_path / ".cache").write_text("in the way")
    with pytest.warns(Note, match=r"cannot cache 'name'.*decoded anew every time"):
        found = cached(tmp_path, "name", [source], filling([]))
    assert found["x"].sum() == 15


def test_a_full_disk_shows_before_the_arrays_are_filled(tmp_path, source, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(Note, match="No space left"):
        found = cached(tmp_path, "name", [source], filling([]))
    assert found["x"].sum() == 15
    assert not list((tmp_path / ".cache").glob("*name*[!k]")), "nothing half-written stays"


def test_two_at_once_decode_once(tmp_path, source):
    calls: list[int] = []
    found: list[torch.Tensor] = []
    gate = threading.Event()

    def slow(make):
        gate.wait(5)
        filling(calls)(make)

    threads = [threading.Thread(target=lambda: found.append(cached(tmp_path, "name", [source], slow)["x"].sum())) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1
    assert [int(total) for total in found] == [15, 15]


def test_a_missing_source_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        cached(tmp_path, "name", [tmp_path / "none"], filling([]))


def test_what_does_not_fit_on_the_disk_is_not_begun(tmp_path, source, monkeypatch):
    free = type("Usage", (), {"free": 5})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("this would fill the disk"))
    with pytest.warns(Note, match="No space left"):
        found = cached(tmp_path, "name", [source], filling([]))
    assert found["x"].sum() == 15


def test_what_fits_neither_disk_nor_memory_is_one_line(tmp_path, source):
    def huge(make):
        make("x", (10**9, 10**9), np.uint8)

    with pytest.raises(InputError, match=r"'x' takes [\d,]+ GB"):
        cached(tmp_path, "name", [source], huge)
