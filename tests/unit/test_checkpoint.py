"""Durable state: bit-exact, atomic, damage is noticed, and it takes at most its share of the time."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedrts.errors import InputError, Note
from fedrts.files import write_atomically
from fedrts.methods.contract import State
from fedrts.runs.checkpoint import Pace, Saved, _digest, load, save
from fedrts.sparse.mask import Mask

SIZES = (40, 24)


def saved(next_round: int, facts: dict[str, Any] | None = None) -> Saved:
    """A state that differs from round to round, with values that are easily lost: -0, subnormals, the largest float, infinity."""
    generator = torch.Generator().manual_seed(next_round)
    mask = Mask(torch.rand(sum(SIZES), generator=generator) < 0.3, SIZES)
    values = torch.randn(mask.number + 7, generator=generator)
    values[:4] = torch.tensor([-0.0, 1e-45, 3.4028235e38, float("inf")])
    memory = {
        "alpha": torch.rand(sum(SIZES), generator=generator) * 1e9,
        "counts": torch.randint(-(2**62), 2**62, (3,), generator=generator),
        "exact": torch.rand(5, generator=generator, dtype=torch.float64),
        "flags": torch.rand(9, generator=generator) < 0.5,
    }
    return Saved(State(values, mask, memory), next_round, facts if facts is not None else {"logs": {"history.jsonl": 10 * next_round}})


def bits(state: State) -> dict[str, bytes]:
    tensors = {"values": state.values, "mask": state.mask.bits, **state.memory}
    return {name: str(tensor.dtype).encode() + tensor.numpy().tobytes() for name, tensor in tensors.items()}


def assert_same(found: Saved | None, expected: Saved) -> None:
    assert found is not None
    assert bits(found.state) == bits(expected.state)
    assert (found.state.mask.sizes, found.next_round, found.facts) == (expected.state.mask.sizes, expected.next_round, expected.facts)


def files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("*.safetensors"))


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def pair(folder: Path) -> Path:
    """A folder with the checkpoints of rounds 1 and 2."""
    save(folder, saved(1))
    save(folder, saved(2))
    return folder


# -- save and load --------------------------------------------------------------------------------------------------


def test_round_trip_is_bit_exact(folder):
    facts = {"logs": {"history.jsonl": 123, "topology.jsonl": 0}, "experiment": {"train.lr": 0.1 + 0.2, "name": 'ä "x"', "list": [1, 2]}}
    save(folder, saved(3, facts))
    assert_same(load(folder), saved(3, facts))


def test_round_trip_of_a_state_without_links_or_memory(folder):
    state = State(torch.randn(4), Mask(torch.zeros(0, dtype=torch.bool), ()))
    save(folder, Saved(state, 0, {}))
    assert_same(load(folder), Saved(state, 0, {}))


def test_saving_does_not_touch_the_state(folder):
    original = saved(1)
    before = bits(original.state)
    save(folder, original)
    assert bits(original.state) == before


def test_views_into_a_larger_tensor_are_saved_whole(folder):
    """Safetensors refuses shared and non-contiguous memory; a state may well have both."""
    base = torch.arange(20.0)
    mask = Mask(torch.ones(4, dtype=torch.bool), (4,))
    state = State(base[2:12:2], mask, {"alpha": base[:4], "beta": base[:4]})
    save(folder, Saved(state, 1, {}))
    found = load(folder)
    assert found is not None
    assert torch.equal(found.state.values, torch.tensor([2.0, 4.0, 6.0, 8.0, 10.0]))
    assert torch.equal(found.state["alpha"], found.state["beta"])


def test_equal_states_make_equal_bytes(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name, saved(1))
    assert [file.name for file in files(tmp_path / "a")] == [file.name for file in files(tmp_path / "b")]


def test_the_last_two_are_kept(folder):
    for number in range(8, 12):  # 9 → 10: a name that sorts as text must not mislead
        save(folder, saved(number))
        assert_same(load(folder), saved(number))
    assert [int(file.name.partition("-")[0]) for file in files(folder)] == [10, 11]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("prepare", [lambda folder: None, lambda folder: folder.mkdir()])
def test_no_checkpoint_is_none(folder, prepare):
    prepare(folder)
    assert load(folder) is None


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda f: flip(f, 100), lambda f: os.truncate(f, 50), lambda f: os.truncate(f, 0)])
def test_damaged_newest_falls_back_with_a_note(pair, damage):
    newest = files(pair)[-1]
    damage(newest)
    with pytest.warns(Note) as caught:
        found = load(pair)
    assert_same(found, saved(1))
    assert [newest.name in str(warning.message) for warning in caught] == [True]


def test_damaged_older_one_is_not_even_noticed(pair):
    flip(files(pair)[0], 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(load(pair), saved(2))


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_damaged_pair_is_an_error_with_a_remedy(pair):
    for file in files(pair):
        flip(file, 100)
    with pytest.raises(InputError, match=r"all checkpoints in .* are damaged: .*delete the folder"):
        load(pair)


def test_a_flipped_bit_is_noticed_anywhere(pair):
    """In the length of the header, the header, the tensors, the last byte: never another state, never an exception."""
    newest = files(pair)[-1]
    whole = newest.read_bytes()
    draw = random.Random(0)
    header = int.from_bytes(whole[:8], "little")
    positions = [0, 7, 8, 8 + header - 1, 8 + header, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(60))]
    for position in positions:
        flip(newest, position, draw.randrange(8))
        with pytest.warns(Note, match=newest.name):
            assert_same(load(pair), saved(1))
        newest.write_bytes(whole)
    assert_same(load(pair), saved(2))


def test_a_checkpoint_renamed_to_a_later_round_keeps_its_own(pair):
    """The round that counts is the one under the checksum."""
    oldest, newest = files(pair)
    newest.rename(newest.with_name("00000009" + newest.name[8:]))
    assert_same(load(pair), saved(2))
    assert oldest.exists()


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
@pytest.mark.parametrize("sorts_before", [True, False])
def test_after_falling_back_two_good_ones_are_kept_again(pair, tmp_path, sorts_before):
    """The damaged file must not count as one of the two: one more damaged file would then be the end of the run.

    The round is played again, but its log lines have other lengths, so that its checkpoint has another checksum and name.
    """
    damaged = files(pair)[-1]
    flip(damaged, 100)
    assert_same(load(pair, repair=True), saved(1))
    for length in range(21, 60):
        replayed = saved(2, {"logs": {"history.jsonl": length}})
        save(tmp_path / str(length), replayed)
        if (files(tmp_path / str(length))[0].name < damaged.name) == sorts_before:
            break
    save(pair, replayed)
    save(pair, saved(3))
    flip(files(pair)[-1], 100)
    assert_same(load(pair), replayed)


# -- atomicity ------------------------------------------------------------------------------------------------------


def _fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_failing_write_leaves_the_old_checkpoints(pair, monkeypatch, call):
    before = {file.name: file.read_bytes() for file in pair.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *_: _fail())
        with pytest.raises(InputError, match=r"cannot write .*00000003-.*No space left on device.*resume"):
            save(pair, saved(3))
    assert {file.name: file.read_bytes() for file in pair.iterdir()} == before
    assert_same(load(pair), saved(2))
    save(pair, saved(3))
    assert_same(load(pair), saved(3))


class Killed(BaseException):
    """What a killed process would not live to see: no handler of the code under test may catch it."""


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_killed_while_writing(pair, monkeypatch, call):
    """A temporary file may stay behind and is ignored; nothing stands under the final name."""

    def die(*_: object) -> None:
        raise Killed

    names = {file.name for file in pair.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, call, die)
        with pytest.raises(Killed):
            save(pair, saved(3))
    left = {file.name for file in pair.iterdir()} - names
    assert all(name.startswith(".") and name.endswith(".tmp") for name in left)
    assert_same(load(pair), saved(2))
    save(pair, saved(3))
    assert_same(load(pair), saved(3))


def test_temporary_files_of_killed_processes_do_not_pile_up(pair, monkeypatch):
    """A checkpoint may have gigabytes, and a replayed round has another name, as its log lines have other lengths."""

    def die(*_: object) -> None:
        raise Killed

    for length in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", die)
            with pytest.raises(Killed):
                save(pair, saved(3, {"logs": {"history.jsonl": length}}))
    save(pair, saved(3))
    assert sorted(pair.iterdir()) == files(pair)


def test_killed_before_the_old_ones_are_removed(pair, monkeypatch):
    """Three files for a moment: the newest counts, and the next checkpoint tidies up."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(Killed):
            save(pair, saved(3))
    assert len(files(pair)) == 3
    assert_same(load(pair), saved(3))
    save(pair, saved(4))
    assert len(files(pair)) == 2


def test_old_checkpoints_go_only_after_the_new_one_is_durable(pair, monkeypatch):
    calls: list[str] = []
    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
        real = getattr(owner, name)

        def noted(*a: Any, _name: str = name, _real: Callable[..., Any] = real, **k: Any) -> Any:
            calls.append(_name)
            return _real(*a, **k)

        monkeypatch.setattr(owner, name, noted)
    save(pair, saved(3))
    assert calls == ["fsync", "replace", "fsync", "unlink"]  # file, rename, folder; only then the oldest


@pytest.mark.parametrize("name", [".00000009-0.safetensors.tmp", ".x.tmp", "notes.txt", "model.safetensors", "00000009-short.safetensors"])
def test_stray_file_is_ignored(pair, name):
    (pair / name).write_bytes(b"not a checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(load(pair), saved(2))
    for number in (3, 4, 5):
        save(pair, saved(number))
    assert_same(load(pair), saved(5))


def test_folder_that_cannot_be_made_is_an_input_error(folder):
    folder.write_text("in the way")
    with pytest.raises(InputError, match="checkpoint"):
        save(folder, saved(1))


def test_write_atomically_replaces_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "file.json"
    write_atomically(target, b"old")
    write_atomically(target, b"new and longer")
    assert target.read_bytes() == b"new and longer"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_write_atomically_into_a_folder_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    shutil.rmtree(gone)
    with pytest.raises(InputError, match=r"cannot write .*gone.*No such file"):
        write_atomically(gone / "file", b"x")


# -- pace -----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def play(
    pace: Pace, clock: Clock, rounds: int, round_takes: Callable[[int], float], write_takes: Callable[[int], float]
) -> dict[int, float]:
    """{round: seconds that its checkpoint took} of a run."""
    written: dict[int, float] = {}
    for done in range(1, rounds + 1):
        clock.pass_(round_takes(done))
        if pace.is_due(done):
            seconds = write_takes(done)
            pace.timed(partial(clock.pass_, seconds))
            written[done] = seconds
    return written


def test_pace_in_rounds():
    clock = Clock()
    written = play(Pace(3, clock), clock, 10, lambda _: 1.0, lambda _: 100.0)
    assert list(written) == [3, 6, 9]


def test_pace_in_seconds():
    clock = Clock()
    written = play(Pace("30s", clock), clock, 20, lambda _: 10.0, lambda _: 0.0)
    assert list(written) == [1, 4, 7, 10, 13, 16, 19]


def test_pace_in_seconds_counts_from_the_end_of_a_write():
    clock = Clock()
    written = play(Pace("30s", clock), clock, 10, lambda _: 10.0, lambda _: 25.0)
    assert list(written) == [1, 4, 7, 10]


def test_auto_writes_every_round_where_that_is_cheap():
    clock = Clock()
    written = play(Pace("auto", clock), clock, 50, lambda _: 1.0, lambda _: 0.05)
    assert list(written) == list(range(1, 51))


def test_auto_writes_after_the_first_round():
    clock = Clock()
    assert list(play(Pace("auto", clock), clock, 5, lambda _: 0.001, lambda _: 60.0)) == [1]


@pytest.mark.parametrize(
    ("round_takes", "write_takes"),
    [
        (lambda _: 1.0, lambda _: 0.3),
        (lambda _: 0.01, lambda _: 2.0),
        (lambda done: 0.1 + done % 7, lambda done: 0.5 + done % 5),
        (lambda _: 0.05, lambda done: 10.0 if done % 13 == 0 else 0.1),
    ],
)
def test_auto_takes_at_most_five_percent_of_the_time(round_takes, write_takes):
    """Up to any write, all writes before it took at most 5 % of the time since the first; and it does not stop writing."""
    clock = Clock()
    pace = Pace("auto", clock)
    started: list[tuple[float, float]] = []
    for done in range(1, 20_001):
        clock.pass_(round_takes(done))
        if pace.is_due(done):
            before = clock.now
            pace.timed(partial(clock.pass_, write_takes(done)))
            started.append((before, clock.now - before))
    assert len(started) > 5
    spent = 0.0
    for at, took in started:
        assert spent <= 0.05 * (at - started[0][0]) + 1e-6
        spent += took
    assert spent > 0.01 * (clock.now - started[0][0]) or len(started) > 1000


def test_a_failing_write_is_not_counted_as_a_checkpoint():
    clock = Clock()
    pace = Pace("30s", clock)
    with pytest.raises(OSError, match="No space"):
        pace.timed(_fail)
    assert pace.is_due(1)


@pytest.mark.parametrize("content", [b"garbage", safetensors.torch.save({"values": torch.ones(2)}), b""])
def test_what_is_no_checkpoint_is_damaged_whatever_its_checksum_says(folder, content):
    save(folder, saved(1))
    (folder / f"00000002-{_digest(content)}.safetensors").write_bytes(content)
    with pytest.warns(Note, match="00000002-.* is damaged"):
        assert_same(load(folder), saved(1))
