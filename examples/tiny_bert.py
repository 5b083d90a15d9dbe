"""Dictionaries, as transformers has them: a tiny BERT, made by its configuration, tells which of two words came first.

python examples/tiny_bert.py
"""

import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import fedrts

Sample = dict[str, Tensor]
FIRST, SECOND, WORDS = 3, 4, 20


def texts(seed: int, count: int = 120, length: int = 10) -> list[Sample]:
    """Tokens, which of them are words (the rest is padding), and 1 where FIRST stands before SECOND."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        words = int(torch.randint(5, length + 1, (), generator=random))
        tokens = torch.randint(5, WORDS, (length,), generator=random)
        one, other = torch.randperm(words, generator=random)[:2].tolist()
        tokens[one], tokens[other], tokens[words:] = FIRST, SECOND, 0
        there = (torch.arange(length) < words).long()
        found.append({"input_ids": tokens, "attention_mask": there, "labels": torch.tensor(int(one < other))})
    return found


def main(short: bool = False) -> None:
    """Train at 60 % of the weights: those of the blocks are pruned, embeddings and the head are not."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    result = fedrts.train(
        model=BertForSequenceClassification(config),
        clients=[DataLoader(texts(seed)) for seed in range(6)],  # type: ignore[arg-type]
        test=DataLoader(texts(99, 200)),  # type: ignore[arg-type]
        loss=lambda model, batch: model(**batch).loss,
        metrics=["accuracy", "f1"],
        method="fedrts",
        density=0.6,
        rounds=2 if short else 16,
        train={"optimizer": "adam", "lr": 0.003, "epochs": 1 if short else 2, "batch_size": 16},
    )
    found = result.summary
    print(f"accuracy {found['accuracy']:.3f} F1 {found['f1']:.3f} density {found['density']:.3f}")
    first = result.history[0]["loss"]
    assert found["loss"] < first if short else found["accuracy"] > 0.9


if __name__ == "__main__":
    main(short="--short" in sys.argv)
