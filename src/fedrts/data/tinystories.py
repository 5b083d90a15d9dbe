"""TinyStories as GPT-2's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrts.data import register
from fedrts.data.cache import Make, cached
from fedrts.data.contract import Data, Recipe
from fedrts.data.digests import seen_as
from fedrts.data.official import File, Official, Source
from fedrts.errors import InputError, optional
from fedrts.tasks import Language

END = "<|endoftext|>"
TRAIN, TEST = "tinystories/TinyStories-train.txt", "tinystories/TinyStories-valid.txt"
VOCABULARY = ("gpt2/vocab.json", "gpt2/merges.txt")
STORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
GPT2 = "https://huggingface.co/openai-community/gpt2/resolve/main"
SOURCE = Source(
    (
        File(f"{STORIES}/TinyStories-train.txt", TRAIN),
        File(f"{STORIES}/TinyStories-valid.txt", TEST),
        File(f"{GPT2}/vocab.json", VOCABULARY[0], "sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        File(f"{GPT2}/merges.txt", VOCABULARY[1], "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    ),
    needed=(TRAIN, TEST, *VOCABULARY),
    official=Official(2_100_000, 21_900, 50_257),
)
RECIPE = Recipe(
    model="gpt2_32m",
    # logits of a test batch take batch · length · 50,257 · 4 bytes
    settings={"clients": {"partition": "quantity", "alpha": 5.0}, "train": {"batch_size": 16}, "eval": {"batch_size": 16}},
)


class Tokens:
    """The view of token numbers stored in 16 bits, signed, because not every device can gather unsigned ones."""

    numbers = 0

    def inputs(self, x: Tensor) -> Tensor:
        return x.long() & 0xFFFF

    def targets(self, y: Tensor) -> Tensor:
        return self.inputs(y)

    def augment(self, x: Tensor, u: Tensor) -> Tensor:
        return self.inputs(x)

    def to(self, device: torch.device | str) -> Tokens:
        return self


@register("tinystories", RECIPE, SOURCE)
def tinystories(folder: Path, length: int = 256, share: float = 1.0, stories: int = 0, words: int = 0) -> Data:
    """2.1 million short stories for children as GPT-2 tokens, cut to `length`; `share` of the training stories, the first ones.

    Inputs and targets are one array, shifted by one token. What follows a story's end is its end token, which no target counts.
    `stories`: read no more than the first so many of each file (0: all). `words`: a vocabulary of the most frequent tokens, all others
    being one token of it (0: GPT-2's).
    """
    SOURCE.require("tinystories", folder)
    if not isinstance(length, int) or length < 2:
        raise InputError(f"data_options.length must be a number of tokens ≥ 2 (got {length!r})")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"data_options.share must be > 0 and ≤ 1 (got {share!r})")
    for name, count, least in (("stories", stories, 1), ("words", words, 3)):
        if isinstance(count, bool) or not isinstance(count, int) or (count != 0 and count < least):
            raise InputError(f"data_options.{name} must be 0 or a number ≥ {least} (got {count!r})")
    tokenizer = _tokenizer(folder)
    end = tokenizer.token_to_id(END)

    def fill(make: Make) -> None:
        tokenizer.enable_truncation(length)
        for name, file in (("train", TRAIN), ("test", TEST)):
            rows = make(name, (sum(1 for _ in islice(_stories(folder / file), stories or None)), length), np.uint16)
            rows[:] = end
            _encode(tokenizer, islice(_stories(folder / file), stories or None), rows)

    found = cached(folder, f"tinystories{length}" + f"first{stories}" * bool(stories), [folder / path for path in SOURCE.needed], fill)
    train, test = (seen_as(found[name], torch.int16) for name in ("train", "test"))
    train = train[: max(1, int(share * len(train)))]
    classes = tokenizer.get_vocab_size()
    if words:
        numbers = _frequent(train, classes, words, end)
        train, test, classes, end = numbers[train.long() & 0xFFFF], numbers[test.long() & 0xFFFF], words, 0
    return Data(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], classes, task=Language(padding=end), view=Tokens())


def _frequent(train: Tensor, classes: int, words: int, end: int) -> Tensor:
    """Return new token numbers `[classes]`: 0 for the end token, then the most frequent of `train`, the last for all others."""
    counts = torch.bincount(train.flatten().long() & 0xFFFF, minlength=classes)
    counts[end] = counts.max() + 1
    kept = counts.sort(descending=True, stable=True).indices[: words - 1]
    numbers = torch.full((classes,), words - 1)
    numbers[kept] = torch.arange(len(kept))
    return numbers.to(torch.int16)


def _stories(file: Path) -> Iterator[str]:
    """Yield the stories of a text file; an end line closes each."""
    lines: list[str] = []
    found = False
    try:
        with open(file, encoding="utf-8") as text:
            for line in text:
                if line.strip() != END:
                    lines.append(line)
                    continue
                if story := "".join(lines).strip():
                    found = True
                    yield story
                lines.clear()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}; get it again") from error
    if story := "".join(lines).strip():
        if not found:
            raise InputError(f"{file} has no line {END}: stories end with one; get it again")
        yield story
    elif not found:
        raise InputError(f"{file} has no stories; get it again")


def _encode(tokenizer: Any, stories: Iterator[str], out: np.ndarray) -> None:
    """Encode `stories` as tokens into the first entries of the rows of `out [n, length]`."""
    rows = iter(out)
    while chunk := list(islice(stories, 1000)):
        for encoded, row in zip(tokenizer.encode_batch(chunk), rows, strict=False):  # the rows of other chunks follow
            row[: len(encoded.ids)] = encoded.ids


def _tokenizer(folder: Path) -> Any:
    """Load GPT-2's byte-pair encoding."""
    tokenizers = optional("tokenizers", "text")
    vocabulary, merges = (str(folder / path) for path in VOCABULARY)
    try:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocabulary, merges))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{folder / 'gpt2'} holds no readable vocabulary: {error}; get vocab.json and merges.txt again") from error
    if tokenizer.token_to_id(END) is None or tokenizer.get_vocab_size() > 2**16:
        raise InputError(f"{vocabulary} is not GPT-2's: it has no {END} or more than 65,536 entries; get it again")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer
