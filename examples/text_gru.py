"""Texts of different lengths: a GRU tells praise from blame, and a collate function pads every batch to its longest text.

python examples/text_gru.py
"""

import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import fedrts

GOOD, BAD = ["good", "great", "fine", "lovely"], ["bad", "awful", "poor", "dull"]
OTHER = ["the", "film", "was", "and", "very", "plot", "music", "cast", "a", "bit"]
WORDS = ["<pad>", *GOOD, *BAD, *OTHER, "not"]
Sample = tuple[list[int], int]


def reviews(seed: int, count: int = 150) -> list[Sample]:
    """Word numbers and 1 for praise; "not" turns the next judgement round."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        praise, turned = draw.random() < 0.5, draw.random() < 0.4
        words = draw.choices(OTHER, k=draw.randint(2, 9))
        judged = draw.choice(GOOD if praise != turned else BAD)
        place = draw.randint(0, len(words))
        words[place:place] = ["not", judged] if turned else [judged]
        found.append(([WORDS.index(word) for word in words], int(praise)))
    return found


def padded(samples: Sequence[Sample]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((tokens [m, longest], lengths [m]), labels [m])."""
    tokens = pad_sequence([torch.tensor(words) for words, _ in samples], batch_first=True)
    return (tokens, torch.tensor([len(words) for words, _ in samples])), torch.tensor([praise for _, praise in samples])


class Reader(nn.Module):
    """`forward` takes the two inputs by position."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 16)
        self.gru = nn.GRU(16, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(tokens))
        logits: Tensor = self.head(states[torch.arange(len(tokens)), lengths - 1])
        return logits


def main(short: bool = False) -> None:
    """Train at half of the weights; rows that do not stack are trained on client by client."""
    torch.manual_seed(0)
    result = fedrts.train(
        model=Reader(),
        clients=[reviews(seed) for seed in range(8)],
        test=reviews(99, 300),
        collate_fn=padded,
        method="fedrts",
        density=0.5,
        rounds=8 if short else 16,
        train={"optimizer": "adam", "lr": 0.005, "epochs": 2, "batch_size": 16},
        engine="serial",
    )
    print(f"accuracy {result.summary['accuracy']:.3f} density {result.summary['density']:.3f}")
    assert result.summary["loss"] < 0.69 if short else result.summary["accuracy"] > 0.95  # ln 2 is the loss of a guess


if __name__ == "__main__":
    main(short="--short" in sys.argv)
