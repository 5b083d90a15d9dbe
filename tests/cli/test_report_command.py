"""`fedrts report` and `fedrts run --tensorboard` as a user calls them."""

import struct
import sys

import pytest

from handmade import write


def test_one_folder_gets_its_report_beside_the_runs(fedrts, tmp_path):
    for seed in (0, 1):
        write(tmp_path / "set" / "runs" / str(seed), [0.1, 0.4, 0.5], seed=seed)
    ended = fedrts("report", tmp_path / "set")
    assert (ended.code, ended.err) == (0, "")
    first, second = ended.out.splitlines()
    assert first.startswith("2 runs, 1 setting: ")
    assert second == str(tmp_path / "set" / "report.html")
    made = {path.name for path in (tmp_path / "set").iterdir()}
    assert made == {"runs", "report.html", "report.md", "report"}
    files = sorted((tmp_path / "set" / "report").iterdir())
    pictures = [file for file in files if file.suffix == ".png"]
    assert len(pictures) >= 10
    assert {file.stem for file in pictures} < {file.stem for file in files if file.suffix == ".csv"}
    for picture in pictures:
        head = picture.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        assert min(struct.unpack(">II", head[16:])) > 200
    page = (tmp_path / "set" / "report.md").read_text("utf-8")
    assert all(f"(report/{picture.name})" in page for picture in pictures)
    assert fedrts("report", tmp_path / "set", "--no-png", "--quiet").out == ""  # again, over the old one


def test_several_folders_get_theirs_where_the_user_is(fedrts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / name, [0.1], density=0.1 if name == "a" else 0.2)
    ended = fedrts("report", "a", "b", "--no-png")
    assert ended.code == 0
    assert (tmp_path / "report.html").exists()
    assert fedrts("report", "a", "b", "--no-png", "--out", "there/deep").out.splitlines()[-1] == "there/deep/report.html"


def test_a_damaged_folder_is_a_note_and_not_the_end(fedrts, tmp_path):
    write(tmp_path / "good", [0.1])
    (write(tmp_path / "bad", [0.1], seed=1) / "summary.json").write_text("{", "utf-8")
    ended = fedrts("report", tmp_path, "--no-png")
    assert ended.code == 0
    (line,) = ended.err.splitlines()
    assert line.startswith(f"note: {tmp_path / 'bad'}: left out: ")
    assert line.removeprefix("note: ") in (tmp_path / "report.md").read_text("utf-8")


@pytest.mark.parametrize("wrong", ["nowhere", "empty", "damaged"])
def test_nothing_to_report_is_one_line(fedrts, tmp_path, wrong):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "experiment.toml").write_text("=", "utf-8")
    ended = fedrts("report", tmp_path / wrong)
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert wrong in line
    assert not (tmp_path / wrong / "report.html").exists()


def test_a_place_that_cannot_be_written_to(fedrts, tmp_path):
    write(tmp_path / "run", [0.1])
    (tmp_path / "file").write_text("", "utf-8")
    ended = fedrts("report", tmp_path / "run", "--no-png", "--out", tmp_path / "file")
    assert ended.code == 2
    assert "choose another --out" in ended.err


def test_without_matplotlib_only_the_pictures_are_missing(fedrts, tmp_path, monkeypatch):
    write(tmp_path / "run", [0.1])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = fedrts("report", tmp_path / "run")
    assert ended.code == 0
    assert "pip install 'fedrts[plot]'" in ended.err
    assert not list((tmp_path / "run" / "report").glob("*.png"))
    assert "![" not in (tmp_path / "run" / "report.md").read_text("utf-8")


def test_tensorboard_is_written_and_goes_on_after_resume(fedrts, tiny, tmp_path):
    ended = fedrts("run", *tiny, "--tensorboard", "--quiet", "--out", tmp_path / "run")
    assert (ended.code, ended.err) == (0, "")
    before = set((tmp_path / "run" / "tensorboard").iterdir())
    assert before
    (tmp_path / "run" / "summary.json").unlink()
    assert fedrts("resume", tmp_path / "run", "--quiet").code == 0
    assert set((tmp_path / "run" / "tensorboard").iterdir()) > before


def test_without_tensorboard_nothing_begins(fedrts, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    ended = fedrts("run", *tiny, "--tensorboard", "--out", tmp_path / "run")
    assert ended.code == 2
    assert ended.err == "error: this needs tensorboard, which is not installed: pip install 'fedrts[tensorboard]'\n"
    assert not (tmp_path / "run").exists()
