"""The interface of data sets: arrays loaded once, in their stored form; a client is a list of row numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedrts import trees
from fedrts.data.digests import digest_of, same_content
from fedrts.errors import InputError
from fedrts.sparse import random
from fedrts.tasks import Classification, Metrics, Task, declared, evaluated
from fedrts.tasks.metrics import described, followed
from fedrts.trees import Tensors


class View(Protocol):
    """How stored rows become a model's inputs: pure functions of whole batches, for one client or many."""

    @property
    def numbers(self) -> int:
        """Random numbers that one augmented sample needs; 0: no augmentation."""
        ...

    def inputs(self, x: Tensor) -> Tensor:
        """Convert stored rows `[m, …]` to model inputs `[m, …]`."""
        ...

    def targets(self, y: Tensor) -> Tensor:
        """Convert stored targets `[m, …]` to the task's targets `[m, …]`."""
        ...

    def augment(self, x: Tensor, u: Tensor) -> Tensor:
        """Augment training inputs with `u [m, numbers]`, uniform in [0, 1)."""
        ...

    def to(self, device: torch.device | str) -> View: ...


@dataclass(frozen=True)
class Data:
    """A data set: rows of `x` with targets `y`, and a test set of the same kind; each a tensor or a tree of them (`fedrts.trees`)."""

    x: Tensors
    y: Tensors
    test_x: Tensors
    test_y: Tensors
    classes: int
    """Number of labels (vocabulary size for language), or of a model's outputs where targets are no labels."""
    task: Task = field(default_factory=Classification)
    view: View | None = None
    """None: rows are stored as a model reads them."""
    valid_x: Tensors | None = None
    valid_y: Tensors | None = None
    """Not trained on either: what a model may be chosen by."""
    owners: Tensor | None = None
    """The client to which each training row belongs `[n]`, where the data say so."""
    owner_names: tuple[str, ...] = ()
    """How these clients are called."""
    apart: str | None = None
    """Why the rows are no tensors that batches can be gathered from; None: they are."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input; for a tree, of its first tensor."""
        first = trees.leaves(trees.opened(trees.at(self.x, slice(0, 1))))[0]
        return tuple(first.shape[1:])

    @property
    def samples(self) -> int:
        """Number of training rows."""
        return trees.count(self.y)

    @property
    def labels(self) -> Tensor | None:
        """The training targets, if they are one class per sample."""
        return self.y if is_label(self.y) else None

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return torch.device(trees.leaves(self.x)[0].device)

    @cached_property
    def fingerprint(self) -> str:
        """A name for the data: all rows and targets, including the validation and test sets."""
        digest = hashlib.blake2b(digest_size=16)
        for name, leaf in self._leaves().items():
            if isinstance(leaf, Tensor):
                digest.update(repr((name, str(leaf.dtype), tuple(leaf.shape), digest_of(leaf))).encode())
            else:
                digest.update(repr((name, leaf.digest)).encode())
        return digest.hexdigest()

    @property
    def sampled_fingerprint(self) -> str:
        """The name for the training data that earlier versions used: all targets and up to 1,024 inputs."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (*trees.leaves(self.y), *trees.leaves(trees.at(self.x, slice(None, None, max(1, self.samples // 1024))))):
            if not isinstance(tensor, Tensor):
                digest.update(tensor.digest.encode())
                continue
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        return digest.hexdigest()

    def inputs(self, x: Tensors) -> Tensors:
        """Return stored rows `[m, …]` as model inputs, for evaluation."""
        return trees.opened(x) if self.view is None else self.view.inputs(x)

    def targets(self, y: Tensors) -> Tensors:
        """Return stored targets `[m, …]` as the task reads them."""
        return trees.opened(y) if self.view is None else self.view.targets(y)

    @property
    def augments(self) -> bool:
        """Whether training inputs are augmented."""
        return self.view is not None and self.view.numbers > 0

    def training_batch(self, rows: Tensor, key: int | None) -> tuple[Tensors, Tensors]:
        """Return inputs and targets of the training rows `rows [m]`; `key` determines the augmentation (None: as for evaluation)."""
        if key is None or self.apart is not None:
            return self.inputs(trees.at(self.x, rows)), self.targets(trees.at(self.y, rows))
        batches = self.training_batches(rows[None], torch.tensor([random.signed(key)], device=rows.device))
        x, y = (trees.at(half, 0) for half in batches)
        return x, y

    def training_batches(self, rows: Tensor, keys: Tensor) -> tuple[Tensors, Tensors]:
        """Return inputs and targets `[k, m, …]` of training rows `rows [k, m]`; `keys [k]` determine the augmentation."""
        x, y = trees.at(self.x, rows.flatten()), self.targets(trees.at(self.y, rows))
        if self.view is None or not self.augments:
            x = self.inputs(x)
        else:
            u = random.uniform(keys, rows.shape[1] * self.view.numbers)
            x = self.view.augment(x, u.view(len(x), -1))
        return trees.mapped(lambda leaf: leaf.unflatten(0, rows.shape), x), y

    def evaluate(self, module: nn.Module, batch_size: int) -> Metrics:
        """Return the task's metrics on the test set, if any, and `valid_…` of the followed ones if there is a validation set."""
        if not trees.count(self.test_y):
            return {}
        metrics = self.judge(module, self.test_x, self.test_y, batch_size)
        if self.valid_x is None or self.valid_y is None:
            return metrics
        valid = self.judge(module, self.valid_x, self.valid_y, batch_size)
        return metrics | {f"valid_{metric.name}": valid[metric.name] for metric in followed(described(declared(self.task), metrics))}

    def judge(self, module: nn.Module, x: Tensors, y: Tensors, batch_size: int) -> Metrics:
        """Return the task's metrics on stored rows and targets, without augmentation."""
        reader = module if self.view is None else _Reader(module, self.view)
        return evaluated(self.task, reader, x, y if self.view is None else self.view.targets(y), batch_size)

    def with_validation(self, share: float) -> Data:
        """Split a random `share` of the training rows, the same for every seed, off as validation set."""
        if share == 0 and not isinstance(share, bool):
            return self
        rest, valid = parted(self.samples, share, "validation")
        return replace(self.only(rest), valid_x=trees.at(self.x, valid), valid_y=trees.at(self.y, valid))

    def only(self, rows: Tensor | slice) -> Data:
        """Keep only these training rows."""
        return replace(self, x=trees.at(self.x, rows), y=trees.at(self.y, rows), owners=None if self.owners is None else self.owners[rows])

    def to(self, device: torch.device | str) -> Data:
        def moved(leaf: Any) -> Any:
            return same_content(leaf, leaf.to(device)) if isinstance(leaf, Tensor) else leaf.to(device)

        there: dict[str, Any] = {name: trees.mapped(moved, tree) for name, tree in self._parts().items()}
        return replace(self, **there, view=self.view and self.view.to(device))

    def _parts(self) -> dict[str, Tensors]:
        """Return the parts that hold rows."""
        names = ("x", "y", "test_x", "test_y", "valid_x", "valid_y")
        return {name: tree for name in names if (tree := getattr(self, name)) is not None}

    def _leaves(self) -> dict[str, Any]:
        return {name: leaf for part, tree in self._parts().items() for name, leaf in trees.named(part, tree).items()}


_TOLD_CLASSES = 1000
"""Classes up to which each of them is counted and judged."""


def is_label(y: Tensors) -> bool:
    """Whether these targets are one class per sample."""
    return isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()


def has_classes(y: Tensors, classes: int) -> bool:
    """Whether these labels have few enough classes to report on each."""
    return is_label(y) and 0 < classes <= _TOLD_CLASSES and int(y.min()) >= 0


class _Reader(nn.Module):
    """A model that reads rows as they are stored."""

    def __init__(self, module: nn.Module, view: View) -> None:
        super().__init__()
        self.module, self.view = module, view
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(self.view.inputs(x))
        return output


def parted(count: int, share: float, purpose: str) -> tuple[Tensor, Tensor]:
    """Split row numbers below `count` in two; the second part is a random `share` of them, the same in every run."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InputError(f"data_options.{purpose} must be a share ≥ 0 and < 1 of the samples (got {share!r})")
    taken = int(share * count)
    if taken == 0:
        raise InputError(f"data_options.{purpose} = {share:g} of {count:,} samples is none: raise it")
    order = random.permutation(random.key(purpose), count)
    return order[taken:].sort().values, order[:taken].sort().values


@dataclass(frozen=True)
class Recipe:
    """The defaults of a data set: a model and the settings for training it."""

    model: str = "mlp"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What both recipes have: the published setting, where there is one."""
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By model, what measurements support beyond that (`recipe = "tuned"`); never for a method."""
