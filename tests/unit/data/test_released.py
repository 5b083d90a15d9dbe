"""How data differ from their release, the sentences that need no files, and shorter TinyStories."""

import hashlib

import pytest
import torch

import official as releases
from fedrts import data
from fedrts.data.contract import Data
from fedrts.data.official import File, Official, Source
from fedrts.data.sentences import LENGTH, PEOPLE, VOCABULARY, sentences, story
from fedrts.errors import InputError
from fedrts.tasks import Language
from helping import source_of


def toy(train=6, test=2, classes=3):
    x = torch.arange(train + test).view(-1, 1)
    return Data(x[:train], x[:train, 0] % 3, x[train:], x[train:, 0] % 3, classes)


@pytest.mark.parametrize(
    ("official", "words"),
    [
        (Official(6, 2, 3), None),
        (Official(6, 2, 3, {"y": (0, 1, 2, 0), "x": (0,)}), None),
        (Official(7, 2, 3), "6 of 7 training samples"),
        (Official(6, 3, 3), "2 of 3 test samples"),
        (Official(6, 2, 200), "3 of 200 classes"),
        (Official(6, 2, 3, {"y": (1, 0)}), "other labels"),
        (Official(6, 2, 3, {"x": (9,)}), "other values"),
    ],
)
def test_differences(official, words, tmp_path):
    found = Source((), (), official).differs(toy(), tmp_path)
    assert found is None if words is None else words in str(found)


def test_a_file_with_another_checksum_is_told(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"released")
    right = File("http://nowhere/a.bin", "a.bin", "md5:" + hashlib.md5(b"released").hexdigest())
    wrong = File("http://nowhere/a.bin", "a.bin", "md5:" + "0" * 32)
    assert Source((right,), ("a.bin",)).differs(toy(), tmp_path) is None
    assert "a.bin is not the published file" in str(Source((wrong,), ("a.bin",)).differs(toy(), tmp_path))


def test_every_data_set_of_the_paper_knows_its_size():
    for name in ("cifar10", "cinic10", "svhn", "tinyimagenet", "tinystories", "fashion_mnist"):
        assert source_of(name).official is not None


# -- sentences ------------------------------------------------------------------------------------------------------


def test_sentences_are_the_same_every_time_and_agree_within():
    first, again = sentences(200), sentences(200)
    assert torch.equal(first.x, again.x)
    assert (len(first.x), len(first.test_x), first.x.shape[1]) == (160, 40, LENGTH - 1)
    assert int(first.x.max()) < first.classes == len(VOCABULARY) == len(set(VOCABULARY))
    assert f"{first.classes} words" in str(sentences.__doc__)
    pronouns = dict(PEOPLE)
    for row in first.x.tolist():
        words = [VOCABULARY[token] for token in row]
        assert words[words.index(".") + 1] == pronouns[words[0]]  # who it was about is told again
        if "then" in words:
            assert words[words.index("with") + 2 : words.index("with") + 4] == words[3:5]  # and what


def test_a_story_by_hand():
    assert " ".join(story([0.0] * 8)) == "tom saw a big ball in the park . he was surprised . then he played with the big ball . <end>"
    assert len(story([0.0] * 8)) <= LENGTH
    assert " ".join(story([0.99] * 8)).startswith("the_dog liked a new box in the river . it was glad . <end>")


def test_targets_are_the_next_words_and_padding_does_not_count():
    held = sentences(50)
    assert torch.equal(held.x[:, 1:], held.y[:, :-1])
    assert isinstance(held.task, Language)
    assert held.task.padding == 0


def test_too_few_sentences():
    with pytest.raises(InputError, match="stories must be a number ≥ 10"):
        sentences(3)


# -- shorter TinyStories --------------------------------------------------------------------------------------------


def test_the_first_stories_and_the_most_frequent_words(tmp_path):
    releases.tinystories(tmp_path)
    whole = data.load("tinystories", {"length": 8}, tmp_path)
    short = data.load("tinystories", {"length": 8, "stories": 2}, tmp_path)
    assert len(short.y) == 2 < len(whole.y)
    assert torch.equal(short.x, whole.x[:2])
    few = data.load("tinystories", {"length": 8, "words": 4}, tmp_path)
    assert few.classes == 4
    before, after = whole.inputs(whole.x), few.inputs(few.x)
    stored = torch.cat([before, whole.targets(whole.y)[:, -1:]], 1)
    assert isinstance(whole.task, Language)
    assert isinstance(few.task, Language)
    counts = torch.bincount(stored[stored != whole.task.padding])
    kept = {number: int(token) for number, token in enumerate(counts.argsort(descending=True, stable=True)[:2], 1)}
    assert few.task.padding == 0
    for new, old in zip(after.flatten().tolist(), before.flatten().tolist(), strict=True):
        assert new == (0 if old == whole.task.padding else next((number for number, token in kept.items() if token == old), 3))


@pytest.mark.parametrize("options", [{"stories": -1}, {"words": 2}, {"words": True}])
def test_bad_options(options, tmp_path):
    releases.tinystories(tmp_path)
    with pytest.raises(InputError, match=f"data_options.{next(iter(options))} must be 0 or a number"):
        data.load("tinystories", options, tmp_path)
