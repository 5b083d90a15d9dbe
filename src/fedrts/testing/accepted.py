"""The data, losses and metrics that `fedrts.train` accepts or refuses, as cases that tests run and docs/python.md lists.

`tests/unit/test_accepted.py` trains every case; `docs/generate.py` writes the table from the same list, so that it cannot go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler, TensorDataset

from fedrts.errors import optional
from fedrts.tasks.metrics import metric

CLIENTS, ROWS = 3, 12
Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One thing that a user may give."""

    part: str
    """Section of the table."""
    what: str
    arguments: Callable[[], dict[str, Any]]
    """What `fedrts.train` is given, beside the usual."""
    why: str = ""
    """Words of the note that says why clients train one after the other; empty: side by side."""
    refused: str = ""
    """Words of the error; empty: it is accepted."""
    same: bool = False
    """Does it train to the same bits as a list of `TensorDataset`s with these rows?"""
    says: str = ""
    """Words of another note."""
    needs: str = ""
    """A package without which it cannot be tried."""
    as_: str = ""
    """What is made of it, for the table."""

    @property
    def outcome(self) -> str:
        """A cell of the table."""
        if self.refused:
            return f"no: “{self.refused}”"
        taken = f"yes, one after the other: “{self.why}”" if self.why else "yes"
        return f"{taken}; {self.as_}" if self.as_ else taken


def rows(client: int) -> tuple[Tensor, Tensor]:
    """Inputs `[ROWS, 4]` and labels of a client; client −1 is the test set."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(client + 1))
    return x, (x[:, 0] > 0).long()


def everyone(make: Callable[[Tensor, Tensor], Any], collection: Callable[[list[Any]], Any] = list) -> dict[str, Any]:
    """Clients and a test set, each made of inputs and labels."""
    return {"clients": collection([make(*rows(client)) for client in range(CLIENTS)]), "test": make(*rows(-1))}


def net(outputs: int = 2) -> nn.Module:
    """A model of one input."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))


class TwoInputs(nn.Module):
    """A model of two inputs by position or by name; its output is `made` from its logits."""

    def __init__(self, made: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.first, self.second, self.out, self.made = nn.Linear(2, 8), nn.Linear(2, 8), nn.Linear(8, 2), made

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.made(self.out((self.first(left) + self.second(right)).relu()))


class WholeBatch(TwoInputs):
    """A model whose forward takes a whole dictionary."""

    def forward(self, inputs: Sample) -> Any:  # type: ignore[override]
        return super().forward(inputs["left"], inputs["right"])


class Dropping(nn.Sequential):
    """A model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))


class MapStyle(Dataset[Any]):
    """Samples by number."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], int(self.y[index])


class Stream(IterableDataset[Any]):
    """Samples one after the other."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


def halves(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two inputs and labels."""
    return (x[:, :2], x[:, 2:]), y


def dictionaries(x: Tensor, y: Tensor) -> list[Sample]:
    """Samples with the names that `TwoInputs.forward` has."""
    return [{"left": one[:2], "right": one[2:], "labels": label} for one, label in zip(x, y, strict=True)]


def stacked(samples: Sequence[Sample]) -> Sample:
    """A collate function that stacks."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def padded(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A collate function whose batches depend on their longest sample."""
    longest = max(int(x.abs().sum() * 2) % 3 + 4 for x, _ in samples)
    return torch.stack([F.pad(x, (0, longest - 4)) for x, _ in samples]), torch.stack([y for _, y in samples])


class InPython(nn.Module):
    """A model that computes with the numbers of its inputs outside PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Any:
        return self.inner(torch.tensor(x.tolist()))


class Cut(nn.Module):
    """A model of inputs of any length ≥ 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x[:, :4])


def frame(x: Tensor, y: Tensor, **more: Any) -> Any:
    """A pandas frame."""
    columns = {name: x[:, place].numpy() for place, name in enumerate("abcd")}
    return optional("pandas", "pandas").DataFrame({**columns, **more, "label": y.numpy()})


def one_frame(**more: Any) -> Any:
    """All clients' rows in a frame, with a column `site`."""
    parts = [rows(client) for client in range(CLIENTS)]
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    return frame(x, y, site=np.repeat(["Aare", "Birs", "Inn"], ROWS), **more)


def hub(x: Tensor, y: Tensor, **more: Any) -> Any:
    """A `datasets.Dataset`."""
    columns = {"left": x[:, :2].tolist(), "right": x[:, 2:].tolist(), "labels": y.tolist()}
    return optional("datasets", "datasets").Dataset.from_dict({**columns, **more})


def by_model(model: nn.Module, batch: Sample) -> Tensor:
    """A loss of (model, batch)."""
    return F.cross_entropy(model(batch["left"], batch["right"]), batch["labels"])


class Output(dict[str, Any]):
    """Like a `ModelOutput`: a dictionary with attributes."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits)
        self.logits = logits


@metric("negatives", lower_is_better=True, format="percent")
def negatives(output: Tensor, target: Tensor) -> float:
    """The share of outputs below 0."""
    return float((output < 0).float().mean())


class ShareAbove:
    """Like a metric of torchmetrics: an object with update and compute."""

    higher_is_better = True

    def __init__(self) -> None:
        self.above, self.seen = 0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        """See a batch."""
        self.above, self.seen = self.above + int((output > 0).sum()), self.seen + output.numel()

    def compute(self) -> float:
        """Return the metric of all batches."""
        return self.above / self.seen


def endless(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples without end."""
    sample = x[0], y[0]
    while True:
        yield sample


def _arrays(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    return x.numpy(), y.numpy()


def _numbers(x: Tensor, y: Tensor) -> TensorDataset:
    return TensorDataset(x, 3 * x[:, 1] + 100)


def _labels(x: Tensor, y: Tensor) -> TensorDataset:
    return TensorDataset(x, (x[:, :3] > 0).float())


def _two(make: Callable[[Tensor, Tensor], Any], model: nn.Module | None = None, **more: Any) -> dict[str, Any]:
    return {**everyone(make), "model": model or TwoInputs(), **more}


def _by_name(parts: list[Any]) -> dict[str, Any]:
    return dict(zip(("Aare", "Birs", "Inn"), parts, strict=True))


SETS, BATCHES, LOSSES, TASKS = "clients and test", "samples and batches", "losses and outputs", "tasks and metrics"

CASES = [
    Case(SETS, "a list of `TensorDataset`", lambda: everyone(TensorDataset), same=True),
    Case(SETS, "map-style datasets", lambda: everyone(MapStyle), same=True),
    Case(SETS, "lists of samples", lambda: everyone(lambda x, y: list(zip(x, y, strict=True))), same=True),
    Case(SETS, "iterable datasets and generators", lambda: everyone(Stream), same=True, as_="read once into rows"),
    Case(SETS, "iterables without end", lambda: everyone(endless), refused="is an iterable of more than 1,000,000 samples"),
    Case(
        SETS,
        "`DataLoader`s",
        lambda: everyone(lambda x, y: DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)),
        same=True,
        as_="their `dataset` and `collate_fn`; a note names what is not used (`batch_size`, `shuffle` …)",
        says="not batch_size, shuffle or sampler",
    ),
    Case(
        SETS,
        "`DataLoader`s with a `batch_sampler`",
        lambda: everyone(lambda x, y: DataLoader(TensorDataset(x, y), batch_sampler=BatchSampler(SequentialSampler(x), 5, False))),
        same=True,
        as_="a note names it as not used",
        says="not batch_sampler",
    ),
    Case(
        SETS,
        "`DataLoader`s with a `SubsetRandomSampler`",
        lambda: everyone(
            lambda x, y: DataLoader(
                TensorDataset(torch.cat([x, x + 9]), torch.cat([y, y])), sampler=SubsetRandomSampler(range(ROWS)), batch_size=5
            )
        ),
        same=True,
        as_="the rows that it chooses",
    ),
    Case(SETS, "NumPy arrays `(x, y)`", lambda: everyone(_arrays), same=True, as_="float64 becomes float32"),
    Case(SETS, "a dictionary by the clients' names", lambda: everyone(_arrays, _by_name), same=True, as_="`clients.json` has the names"),
    Case(SETS, "pandas frames with `target=`", lambda: {**everyone(frame), "target": "label"}, same=True, needs="pandas"),
    Case(
        SETS,
        "one frame with `client=` and `target=`",
        lambda: {"clients": one_frame(), "test": frame(*rows(-1)), "client": "site", "target": "label"},
        same=True,
        needs="pandas",
    ),
    Case(
        SETS,
        "columns of words in a frame",
        lambda: {
            "clients": one_frame(sex=["f", "m"] * (CLIENTS * ROWS // 2)),
            "test": 0.25,
            "client": "site",
            "target": "label",
            "model": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
        },
        needs="pandas",
        as_="one column of 0 and 1 for each word of all clients",
    ),
    Case(
        SETS,
        "missing values in a frame",
        lambda: {
            "clients": one_frame(age=[1.0] * 20 + [float("nan")] + [1.0] * (CLIENTS * ROWS - 21)),
            "test": 0.25,
            "client": "site",
            "target": "label",
        },
        refused="row 21 has no value in the column 'age'",
        needs="pandas",
    ),
    Case(
        SETS,
        "columns of times in a frame",
        lambda: {
            "clients": one_frame(born=np.arange(CLIENTS * ROWS).astype("datetime64[D]")),
            "test": 0.25,
            "client": "site",
            "target": "label",
        },
        refused="the column 'born' holds times: make it numbers or words, or leave it out",
        needs="pandas",
    ),
    Case(
        SETS,
        "one frame without `client=`",
        lambda: {"clients": one_frame(), "test": 0.25},
        refused="say with client= which column",
        needs="pandas",
    ),
    Case(SETS, "`datasets.Dataset`s", lambda: _two(hub), same=True, needs="datasets", as_="columns by name"),
    Case(
        SETS,
        "one `datasets.Dataset` with `client=`",
        lambda: {
            "clients": optional("datasets", "datasets").concatenate_datasets(
                [hub(*rows(client), site=["ABC"[client]] * ROWS) for client in range(CLIENTS)]
            ),
            "test": hub(*rows(-1), text=["so"] * ROWS),
            "client": "site",
            "model": TwoInputs(),
        },
        same=True,
        needs="datasets",
        as_="columns of text are left out, and a note names them",
    ),
    Case(
        SETS,
        "`datasets.Dataset`s with a target of words",
        lambda: _two(lambda x, y: hub(x, y, label=["so"] * ROWS).remove_columns("labels")),
        refused="the target 'label' holds words",
        needs="datasets",
    ),
    Case(
        SETS,
        "`datasets.Dataset`s with missing values",
        lambda: _two(lambda x, y: hub(x, y, age=[1.0, None] + [1.0] * (ROWS - 2))),
        refused="row 2 has no value in the column 'age'",
        needs="datasets",
    ),
    Case(SETS, "`test=0.25`", lambda: {"clients": everyone(TensorDataset)["clients"], "test": 0.25}, as_="a share of every client's rows"),
    Case(SETS, "one dataset", lambda: {"clients": TensorDataset(*rows(0)), "test": 0.25}, refused="give a list of datasets"),
    Case(SETS, "an empty dataset", lambda: {"clients": [[]], "test": 0.25}, refused="is empty"),
    Case(BATCHES, "`(input, target)`", lambda: everyone(TensorDataset), same=True),
    Case(
        BATCHES,
        "lists of numbers in samples",
        lambda: everyone(lambda x, y: [(row.tolist(), int(label)) for row, label in zip(x, y, strict=True)]),
        same=True,
        as_="a list is a vector",
    ),
    Case(
        BATCHES,
        "dictionaries with lists of numbers, as of tokenizers",
        lambda: _two(lambda x, y: [{name: part.tolist() for name, part in sample.items()} for sample in dictionaries(x, y)]),
        same=True,
    ),
    Case(BATCHES, "`((input, input), target)`", lambda: _two(halves), same=True, as_="`forward` by position"),
    Case(
        BATCHES,
        "`(input, input, target)`",
        lambda: _two(lambda x, y: TensorDataset(x[:, :2], x[:, 2:], y)),
        same=True,
        as_="the last is the target",
    ),
    Case(BATCHES, "dictionaries with `labels`", lambda: _two(dictionaries), same=True, as_="`forward` by name; `target=` for another name"),
    Case(
        BATCHES,
        "dictionaries for a `forward` of one argument",
        lambda: _two(dictionaries, WholeBatch()),
        same=True,
        as_="the dictionary whole",
    ),
    Case(
        BATCHES,
        "targets that are tuples or dictionaries",
        lambda: {
            **everyone(lambda x, y: (x, {"above": y, "size": x[:, 1]})),
            "loss": lambda output, target: F.cross_entropy(output[:, :2], target["above"]) + F.mse_loss(output[:, 2], target["size"]),
            "model": net(3),
        },
        as_="for a loss that knows their parts",
    ),
    Case(BATCHES, "a `collate_fn` that stacks", lambda: _two(dictionaries, collate_fn=stacked), same=True),
    Case(
        BATCHES,
        "a `collate_fn` that pads to the longest",
        lambda: {**everyone(lambda x, y: list(zip(x, y, strict=True))), "collate_fn": padded, "model": Cut()},
        why="the collate_fn makes a batch of more than one row after the other",
    ),
    Case(
        BATCHES,
        "samples of different lengths without a `collate_fn`",
        lambda: everyone(lambda x, y: [(row[: 2 + place % 2], label) for place, (row, label) in enumerate(zip(x, y, strict=True))]),
        refused="of equal shapes, or a collate_fn that takes them",
    ),
    Case(
        BATCHES,
        "inputs of float64",
        lambda: everyone(lambda x, y: [(row.double(), label) for row, label in zip(x, y, strict=True)]),
        same=True,
        as_="they become what the model's parameters are",
    ),
    Case(
        BATCHES,
        "clients of different shapes",
        lambda: {"clients": [TensorDataset(*rows(0)), TensorDataset(rows(1)[0][:, :3], rows(1)[1])], "test": 0.25},
        refused="the input has shape [3] there and shape [4] here",
    ),
    Case(
        BATCHES,
        "words in NumPy arrays",
        lambda: everyone(lambda x, y: (x.numpy(), np.where(y, "yes", "no"))),
        refused="an array must hold numbers, and holds <U3",
    ),
    Case(
        BATCHES,
        "text in samples",
        lambda: everyone(lambda x, y: [("so", label) for label in y]),
        refused="must be numbers, and is str",
    ),
    Case(BATCHES, "no target", lambda: everyone(lambda x, y: [*x]), refused="gives no target"),
    Case(LOSSES, "`loss(output, target)`", lambda: {**everyone(TensorDataset), "loss": F.cross_entropy}, same=True),
    Case(LOSSES, "`loss(model, batch)`", lambda: _two(dictionaries, loss=by_model), same=True, as_="the batch as it was collated"),
    Case(
        LOSSES,
        "`loss(model, batch)` without targets",
        lambda: {
            **everyone(lambda x, y: TensorDataset(x)),
            "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[0]),
            "model": net(4),
        },
    ),
    Case(LOSSES, "outputs with `logits` (a `ModelOutput`)", lambda: _two(dictionaries, TwoInputs(Output)), same=True),
    Case(
        LOSSES,
        "outputs that are tuples",
        lambda: _two(
            dictionaries,
            TwoInputs(lambda logits: (logits, logits.sum())),
            loss=lambda output, target: F.cross_entropy(output[0], target),
            correct=lambda output, target: (output[0].argmax(1) == target).sum(),
        ),
        same=True,
        as_="for a loss that knows their parts",
    ),
    Case(
        LOSSES,
        "outputs that are tuples, with the default loss",
        lambda: _two(dictionaries, TwoInputs(lambda logits: (logits, logits.sum()))),
        refused="the model gives a tuple",
    ),
    Case(
        LOSSES,
        "numbers for targets, with the default loss",
        lambda: everyone(lambda x, y: TensorDataset(x, x[:, 0])),
        refused="cross-entropy takes whole numbers as labels",
    ),
    Case(
        LOSSES,
        "models that take numbers out of tensors (`.item()`, `.tolist()`, `.numpy()`)",
        lambda: {**everyone(TensorDataset), "model": InPython()},
        why="what the model does depends on numbers that it takes out of a tensor",
    ),
    Case(LOSSES, "dropout", lambda: {**everyone(TensorDataset), "model": Dropping()}, why="the model draws random numbers while it trains"),
    Case(TASKS, '`task="regression"`', lambda: {**everyone(_numbers), "task": "regression", "model": net(1)}, as_="MAE, RMSE, R²"),
    Case(
        TASKS,
        '`task="multilabel"`',
        lambda: {**everyone(_labels), "task": "multilabel", "model": net(3)},
        as_="F1 (macro and micro), AUROC",
    ),
    Case(TASKS, '`task="imbalanced"`', lambda: {**everyone(TensorDataset), "task": "imbalanced"}, as_="F1 (macro), AUROC, accuracy"),
    Case(
        TASKS,
        '`task="regression"` on targets of three axes',
        lambda: {**everyone(lambda x, y: TensorDataset(x, x[:, :, None])), "task": "regression"},
        refused="takes targets [n] or [n, k]",
    ),
    Case(TASKS, "a metric that is a function under `@metric`", lambda: {**everyone(TensorDataset), "metrics": [negatives]}, same=True),
    Case(
        TASKS,
        "a metric that is an object with `update` and `compute`",
        lambda: {**everyone(TensorDataset), "metrics": [ShareAbove()]},
        same=True,
        as_="`higher_is_better` says the direction",
    ),
    Case(TASKS, "a plain function as a metric", lambda: {**everyone(TensorDataset), "metrics": [F.l1_loss]}, refused="is no metric"),
]


def table() -> list[list[str]]:
    """The rows of the table, with its heading."""
    found = [["what you give", "is it accepted?"]]
    for part in dict.fromkeys(case.part for case in CASES):
        found.append([f"**{part}**", ""])
        found += [[case.what, case.outcome] for case in CASES if case.part == part]
    return found
