"""Short stories from a small grammar: language that needs no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedrts.data import register
from fedrts.data.contract import Data, Recipe
from fedrts.errors import InputError
from fedrts.sparse import random
from fedrts.tasks import Language

PEOPLE = (
    ("tom", "he"),
    ("ben", "he"),
    ("max", "he"),
    ("lily", "she"),
    ("mia", "she"),
    ("anna", "she"),
    ("the_cat", "it"),
    ("the_dog", "it"),
)
THINGS = ("ball", "cake", "boat", "book", "hat", "kite", "apple", "box")
LOOKS = ("big", "small", "red", "blue", "old", "new")
PLACES = ("park", "house", "garden", "shop", "river")
DEEDS = ("saw", "found", "took", "wanted", "liked")
FEELINGS = (("found", "happy"), ("took", "proud"), ("wanted", "sad"), ("liked", "glad"), ("saw", "surprised"))
ENDINGS = ("played", "ran", "slept", "sang")
END = "<end>"
VOCABULARY = (
    END,
    *dict.fromkeys(["a", "in", "the", "was", "and", "then", "with", ".", "he", "she", "it"]),
    *(name for name, _ in PEOPLE),
    *THINGS,
    *LOOKS,
    *PLACES,
    *DEEDS,
    *(feeling for _, feeling in FEELINGS),
    *ENDINGS,
)
LENGTH = 24
"""Tokens of a story, its end and what follows included."""
NUMBERS = 8
"""Random numbers that a story takes at most."""

RECIPE = Recipe(
    model="tiny_gpt",
    settings={
        "rounds": 40,
        "clients": {"total": 20, "per_round": 5, "partition": "quantity", "alpha": 5.0},
        "train": {"batch_size": 16, "lr": 0.3, "epochs": 2},
    },
    tuned={"tiny_gpt": {"train": {"lr": 0.6}}},
)


@register("sentences", RECIPE)
def sentences(stories: int = 1200) -> Data:
    """Short stories of a small grammar, 53 words, made on the spot; who did what comes back later. A fifth are test data."""
    if isinstance(stories, bool) or not isinstance(stories, int) or stories < 10:
        raise InputError(f"data_options.stories must be a number ≥ 10 (got {stories!r})")
    numbers = random.uniform(random.key("sentences"), stories * NUMBERS).view(stories, NUMBERS).tolist()
    rows = torch.tensor([_numbered(story(row)) for row in numbers])
    test = stories // 5
    x, y = rows[:, :-1], rows[:, 1:]
    return Data(x[test:], y[test:], x[:test], y[:test], classes=len(VOCABULARY), task=Language(padding=0))


def story(numbers: Sequence[float]) -> list[str]:
    """Return the words of a story, determined by `numbers [8]`, uniform in [0, 1)."""
    rest = iter(numbers)

    def one_of(choices: Sequence[str]) -> str:
        return choices[int(next(rest) * len(choices))]

    return _told(one_of)


def _told(one_of: Callable[[Sequence[str]], str]) -> list[str]:
    name = one_of([name for name, _ in PEOPLE])
    pronoun = dict(PEOPLE)[name]
    deed, look, thing, place = one_of(DEEDS), one_of(LOOKS), one_of(THINGS), one_of(PLACES)
    words = [name, deed, "a", look, thing, "in", "the", place, "."]
    words += [pronoun, "was", dict(FEELINGS)[deed], "."]
    if one_of(("with", "alone")) == "with":
        words += ["then", pronoun, one_of(ENDINGS), "with", "the", look, thing, "."]
    return [*words, END]


def _numbered(words: Sequence[str]) -> list[int]:
    numbers = [VOCABULARY.index(word) for word in words]
    return numbers + [0] * (LENGTH - len(numbers))
