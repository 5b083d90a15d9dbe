"""Tasks: the loss of a batch and the metrics of a test set."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts import trees
from fedrts.errors import InputError, note, reason
from fedrts.sparse.mode import training
from fedrts.tasks.crossentropy import linear_cross_entropy, rows_at_once
from fedrts.tasks.measures import IGNORED, Meter, RightAnswers, labelled_rightly
from fedrts.tasks.metrics import ACCURACY, LOSS, Metric, declaration, may_be_named
from fedrts.tasks.metrics import names as metric_names
from fedrts.trees import Tensors

Loss = Callable[[Any, Any], Tensor]
"""(output, target) of a batch, or (model, batch) → its mean loss."""
CountRight = Callable[[Any, Any], Tensor]
Join = Callable[[Tensors, Tensors], Tensors]
"""Inputs and targets → the batch that they were taken from."""


Metrics = dict[str, float]


class Task(Protocol):
    """A loss for training and metrics for evaluation.

    One that gives other metrics than `loss` and `accuracy` says which in its attribute `metrics`, names or `Metric`s. The first of them
    that is not the loss is what it is judged by.
    """

    def loss(self, module: nn.Module, x: Any, y: Any, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        """Return the mean loss of a batch of inputs `x` with targets `y`, with outputs divided by `temperature`.

        `twice`: its gradient will be differentiated again.
        """
        ...

    def evaluate(self, module: nn.Module, x: Any, y: Any, batch_size: int) -> Metrics:
        """Return metrics over all samples, by name: `loss`, and those in `metrics`; `batches` splits them."""
        ...


def declared(task: Task) -> tuple[Metric, ...]:
    """Return the metrics that a task's evaluation gives, in the order in which clients send them."""
    given = getattr(task, "metrics", (ACCURACY,))
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"the task's metrics are {given!r}: give a list of names, or of fedrts.tasks.metrics.Metric")
    found = {metric.name: metric for metric in map(declaration, given)}
    return tuple(found.values()) if LOSS.name in found else (LOSS, *found.values())


def _beside_loss(task: Task) -> list[Metric]:
    return [metric for metric in declared(task) if metric.name != LOSS.name]


def evaluated(task: Task, module: nn.Module, x: Tensors, y: Tensors, batch_size: int) -> Metrics:
    """Evaluate a task's metrics; an `InputError` if one is not a number."""
    found = task.evaluate(module, x, y, batch_size)
    for name, value in found.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise InputError(f"the task's evaluate gives {value!r} for '{name}': give a number, such as float(…)")
    return {name: value if isinstance(value, int | float) else float(value) for name, value in found.items()}


def logits(output: Any) -> Tensor:
    """Return the tensor of an output that the built-in losses use."""
    found = trees.answer(output)
    if not isinstance(found, Tensor):
        raise InputError(f"the model gives a {type(found).__name__}, not one tensor or one called logits: give a loss of your own")
    return found


def cross_entropy(output: Any, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of logits `[m, classes]` and labels `[m]`; other forms as `F.cross_entropy` takes them.

    `smoothing` is the share of a label that is spread evenly over all classes.

    The same as there up to rounding, in operations that vmap takes as they are: it takes the other ones apart into a dozen pieces.
    """
    found = logits(output)
    if target.is_floating_point() and target.dim() < found.dim():
        raise InputError(
            f"cross-entropy takes whole numbers as labels, and targets are {str(target.dtype).removeprefix('torch.')}: make labels whole "
            "(y.long()); for numbers say task='regression', or give a loss"
        )
    if found.dim() == 2 and target.dim() == 2 and target.shape[1] == 1 and not target.is_floating_point():
        raise InputError("cross-entropy takes labels [n], and these are [n, 1]: give y.squeeze(1)")
    if found.dim() != 2 or target.is_floating_point():
        return F.cross_entropy(found, target, label_smoothing=smoothing)
    likelihood = found.log_softmax(-1)
    loss = -likelihood.gather(-1, target.long().unsqueeze(-1)).mean()
    return (1 - smoothing) * loss - smoothing * likelihood.mean() if smoothing else loss


@dataclass(frozen=True)
class Classification:
    """One label per sample, or any target that your own `criterion` and `correct` understand."""

    criterion: Loss = cross_entropy
    correct: CountRight | None = None
    """(output, target) → number (or share, summed) of correct answers in the batch; default: arg-max equals label."""
    smoothing: ClassVar[float] = 0.0
    """Label smoothing of the training loss, see `smoothed`; evaluation has none."""

    def loss(self, module: nn.Module, x: Tensors, y: Tensors, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        output = trees.called(module, x)
        criterion = partial(cross_entropy, smoothing=self.smoothing) if self.smoothing else self.criterion
        return criterion(output if temperature == 1 else cooled(output, temperature), y)

    def judged(self, module: nn.Module, x: Tensors, y: Tensors) -> tuple[float, Any]:
        """Return the mean loss of a batch, and the output."""
        output = trees.called(module, x)
        return float(self.criterion(output, y)), output

    def evaluate(self, module: nn.Module, x: Tensors, y: Tensors, batch_size: int) -> Metrics:
        loss = correct = 0.0
        count = self.correct or labelled_rightly
        for inputs, targets, rows in batches(module, x, y, batch_size):
            mean, output = self.judged(module, inputs, targets)
            loss += mean * rows
            correct += _number(count(output, targets))
        return {"loss": loss / trees.count(y), "accuracy": correct / trees.count(y)}

    def check_count(self, module: nn.Module, x: Tensors, y: Tensors) -> None:
        """Check that `correct` returns numbers of samples, and not a mean, which is the same for a batch and its halves."""
        count = self.correct or labelled_rightly
        with training(module, False), torch.no_grad():
            output, rows = trees.called(module, x), trees.count(y)
            whole = float(count(output, y))
            halves = [whole / 2, whole / 2]
            if isinstance(output, Tensor) and isinstance(y, Tensor) and rows > 1:
                halves = [float(count(*half)) for half in zip(output.tensor_split(2), y.tensor_split(2), strict=True)]
        if not 0 <= whole <= rows or abs(sum(halves) - whole) > 1e-3 * rows:
            raise InputError(
                f"`correct` must give the number of right answers in a batch (is it a mean?): it gives {whole:g} for {rows} samples, "
                f"and {halves[0]:g} and {halves[1]:g} for their halves"
            )


@dataclass(frozen=True)
class Prediction(Classification):
    """Any targets, evaluated by the loss and by metrics of all outputs and targets.

    `Prediction(F.mse_loss, metrics=("mae", "r2"))`; right answers count where `metrics` has "accuracy", by `correct` if that is given.
    """

    metrics: tuple[str | Metric, ...] = ()

    def shown(self, output: Any, y: Tensors) -> tuple[Any, Any]:
        """Return output and targets of a batch as metrics see them."""
        return output, y

    def weight(self, y: Tensors) -> int:
        """Return the weight of a batch's mean loss: its number of samples."""
        return trees.count(y)

    def evaluate(self, module: nn.Module, x: Tensors, y: Tensors, batch_size: int) -> Metrics:
        loss, total = 0.0, 0
        meters = {metric.name: self._meter(metric) for metric in _beside_loss(self)}
        for inputs, targets, _ in batches(module, x, y, batch_size):
            mean, output = self.judged(module, inputs, targets)
            weight = self.weight(targets)
            loss, total = loss + mean * weight, total + weight
            _update(meters, *self.shown(output, targets))
        return {LOSS.name: loss / max(total, 1), **_computed(meters)}

    def _meter(self, metric: Metric) -> Meter:
        return RightAnswers(self.correct) if metric.name == ACCURACY.name and self.correct is not None else metric()

    def check_count(self, module: nn.Module, x: Tensors, y: Tensors) -> None:
        if ACCURACY.name in {metric.name for metric in declared(self)}:
            super().check_count(module, x, y)


def _no_batch(x: Tensors, y: Tensors) -> Tensors:
    raise InputError("a loss of (model, batch) needs the batch as it was: it is for fedrts.train")


@dataclass(frozen=True)
class OfBatches(Prediction):
    """Train with a `criterion(model, batch)` that calls the model itself; metrics use the model's outputs for the batch's inputs."""

    join: Join = _no_batch

    def loss(self, module: nn.Module, x: Tensors, y: Tensors, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        if temperature != 1:
            raise InputError(
                "this method divides the model's outputs by a temperature, which a loss of (model, batch) does not see: "
                "give a loss of (output, target), or method_options.temperature = 1"
            )
        return self.criterion(module, self.join(x, y))

    def judged(self, module: nn.Module, x: Tensors, y: Tensors) -> tuple[float, Any]:
        loss = float(self.criterion(module, self.join(x, y)))
        return loss, trees.called(module, x) if _beside_loss(self) else None

    def check_count(self, module: nn.Module, x: Tensors, y: Tensors) -> None:
        return None


def of_batches(loss: Loss) -> bool:
    """Whether this is a loss of (model, batch), by its parameters' names."""
    try:
        names = [parameter.name for parameter in inspect.signature(loss).parameters.values()][:2]
    except (TypeError, ValueError):  # written in C
        return False
    return len(names) == 2 and (names[0] in ("model", "module", "net") or names[1] == "batch")


def cooled(output: Any, temperature: float) -> Any:
    """Return an output whose numbers are divided by a temperature."""
    return trees.mapped(lambda part: part / temperature if isinstance(part, Tensor) and part.is_floating_point() else part, output)


def _number(counted: Tensor) -> float:
    """Return what `correct` counts for a batch."""
    if isinstance(counted, Tensor) and counted.numel() != 1:
        raise InputError(f"`correct` must give one number, of the right answers in a batch (it gives {list(counted.shape)}): add .sum()")
    return float(counted)


def _update(meters: Mapping[str, Meter], output: Any, targets: Any) -> None:
    for name, meter in meters.items():
        with _measuring(name, output, targets):
            meter.update(output, targets)


def _computed(meters: Mapping[str, Meter]) -> Metrics:
    found = {}
    for name, meter in meters.items():
        with _measuring(name):
            found[name] = float(meter.compute())
    return found


@contextmanager
def _measuring(metric: str, *seen: Any) -> Iterator[None]:
    """Turn an error during the block into one line that names the metric."""
    try:
        yield
    except Exception as error:  # whatever a user's own metric raises
        forms = " of outputs {} and targets {}".format(*map(_form, seen)) if seen else ""
        raise InputError(f"the metric '{metric}'{forms} cannot be measured: {reason(error)}") from error


def _form(part: Any) -> str:
    """Return the shape of an output or a target, or its type if it is not a tensor."""
    return str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__


def predicting(
    criterion: Loss | None, correct: CountRight | None, metrics: Sequence[str | Metric], labels: bool, join: Join | None = None
) -> Task:
    """The task of a loss and metrics: right answers count where somebody says what they are, or targets are `labels`.

    A loss of (model, batch) needs to know how halves of a batch are put together again.
    """
    counted = correct is not None or labels
    if join is not None and criterion is not None:
        return judged_by(OfBatches(criterion, correct, (ACCURACY.name,) if counted else (), join), metrics)
    return judged_by((Classification if counted else Prediction)(criterion or cross_entropy, correct), metrics)


def judged_by(task: Task, more: Sequence[str | Metric]) -> Task:
    """A task that gives `more` metrics; accuracy leads them where it has one, unless they name it in another place."""
    wanted = tuple(dict.fromkeys(map(declaration, more)))
    if not wanted:
        return task
    named = {metric.name: metric for metric in wanted}
    if twice := next((metric.name for metric in wanted if named[metric.name] is not metric), None):
        raise InputError(f"two metrics have the name '{twice}': wrap their classes in fedrts.tasks.metrics.Metric, which gives each a name")
    if isinstance(task, Language):
        return _language_judged_by(task, wanted)
    adds_up = type(task) is Classification or (isinstance(task, Prediction) and type(task).evaluate is Prediction.evaluate)
    if not adds_up:  # whose evaluate this one's takes the place of
        raise InputError(
            f"the task {type(task).__name__} brings its own metrics: let its evaluate give {', '.join(m.name for m in wanted)}"
        )
    for metric in wanted:
        metric()  # an error where it cannot be measured
    own = tuple(metric for metric in _beside_loss(task) if metric.name not in named)
    assert isinstance(task, Classification)
    if isinstance(task, Prediction):
        return replace(task, metrics=(*own, *wanted))
    return Prediction(task.criterion, task.correct, (*own, *wanted))


def _language_judged_by(task: Language, wanted: Sequence[Metric]) -> Task:
    """Return a task with metrics of all its tokens beside its own, which keep their places unless accuracy is named in another."""
    for metric in wanted:
        if metric.name not in Language.metrics:
            metric()
    named = {metric.name for metric in wanted}
    own = [name for name in Language.metrics if name not in named]
    judged = copy.copy(task)
    _set(judged, "metrics", (*wanted, *own) if ACCURACY.name in named else (*own, *wanted))
    return judged


def smoothed(task: Task, share: float) -> Task:
    """Return a task whose training loss spreads this `share` of every label evenly over all classes."""
    if getattr(task, "criterion", cross_entropy) is not cross_entropy or not hasattr(task, "smoothing"):
        raise InputError("train.smoothing smooths the labels of cross-entropy, and this loss is your own: set it to 0")
    smooth = copy.copy(task)
    _set(smooth, "smoothing", share)
    return smooth


def _set(task: Task, name: str, value: object) -> None:
    """Set what is no field of a frozen task: run folders know a task by its fields, and the experiment says this."""
    object.__setattr__(task, name, value)


def check(task: Task, module: nn.Module, x: Tensors, y: Tensors, test_x: Tensors, test_y: Tensors) -> None:
    """Try a task on a few training and test samples without changing the model, so that mistakes show before training."""
    try:
        with training(module, False), torch.enable_grad():
            loss = task.loss(module, x, y)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                raise InputError(f"the loss must be a tensor with one number, the mean over a batch; it gave {loss!r}")
            if not loss.requires_grad:
                raise InputError("the loss has no gradient by the model's parameters: does it detach the outputs, or make numbers of them?")
            torch.autograd.grad(loss, [part for part in module.parameters() if part.requires_grad], allow_unused=True)
        found = evaluated(task, module, test_x, test_y, trees.count(test_y))
    except InputError:
        raise
    except Exception as error:  # whatever a user's own code raises
        own = isinstance(task, Classification) and not isinstance(task, OfBatches) and task.criterion is not cross_entropy
        names = " (the loss is called as loss(output, target); one of (model, batch) has parameters of these names)" if own else ""
        raise InputError(f"the model, its loss and these targets do not go together: {reason(error)}{names}") from error
    if missing := [metric.name for metric in declared(task) if metric.name not in found]:
        raise InputError(
            f"the task's evaluate gives no {' and no '.join(missing)}: it needs a loss, and the metrics that the task's `metrics` names "
            '(without such an attribute "accuracy")'
        )
    for name in sorted(found.keys() - {metric.name for metric in declared(task)} - set(metric_names())):
        if may_be_named(name):
            note(
                f"the task's evaluate gives '{name}', which nothing declares: it is treated as a plain number, higher is better; "
                "the task's `metrics` may have a fedrts.tasks.metrics.Metric for it"
            )
        else:
            note(f"the task's evaluate gives '{name}', which is left out: no metric can have that name; rename it")


@runtime_checkable
class Projecting(Protocol):
    """A language model with logits `hidden(x) [batch, time, width] @ output_matrix [vocabulary, width]ᵀ`."""

    output_matrix: Tensor

    def hidden(self, x: Tensor) -> Tensor: ...


FUSED_FROM = 2**20
"""The number of a batch's logits from which on it pays not to hold them all: below, that is the slower way (measured on a CPU)."""


@dataclass(frozen=True)
class Language:
    """Next-token prediction; targets equal to `padding` do not count. Samples are stories of equal (padded) length.

    Inputs and targets are token numbers `[batch, time]` of any integer type. Many logits exist together only for models that do not
    say how they project (see `Projecting`) and where a gradient is to be differentiated again.
    """

    padding: int = IGNORED
    smoothing: ClassVar[float] = 0.0
    metrics: ClassVar[tuple[str | Metric, ...]] = ("loss", "accuracy", "perplexity", "perplexity_corpus")
    """Others are of all tokens that count: their logits `[tokens, vocabulary]` and targets `[tokens]`; see `judged_by`."""

    def loss(self, module: nn.Module, x: Tensors, y: Tensor, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        target = y.long().flatten()
        plain = not twice and not self.smoothing
        if isinstance(module, Projecting) and plain and y.numel() * len(module.output_matrix) >= FUSED_FROM:
            return linear_cross_entropy(module.hidden(x).flatten(0, 1) / temperature, module.output_matrix, target, self.padding)
        found = logits(trees.called(module, x)).flatten(0, 1) / temperature
        return F.cross_entropy(found, target, ignore_index=self.padding, label_smoothing=self.smoothing)

    def evaluate(self, module: nn.Module, x: Tensors, y: Tensor, batch_size: int) -> Metrics:
        """Return `perplexity`, the mean over stories of exp(mean token NLL), and `perplexity_corpus`, exp of the mean over all tokens."""
        perplexity = accuracy = nll = tokens = 0.0
        stories = 0
        meters = {metric.name: metric() for metric in declared(self) if metric.name not in Language.metrics}
        for inputs, targets, _ in batches(module, x, y, batch_size):
            targets = targets.long()
            counted = targets != self.padding
            lengths = counted.sum(1)
            losses, hits = self._judged(module, inputs, targets, meters)
            losses, hits = losses.double().sum(1), (hits & counted).double().sum(1)
            some = lengths > 0
            perplexity += float((losses[some] / lengths[some]).exp().sum())
            accuracy += float((hits[some] / lengths[some]).sum())
            nll, tokens = nll + float(losses.sum()), tokens + float(lengths.sum())
            stories += int(some.sum())
        return {
            **_computed(meters),
            "loss": nll / tokens,
            "accuracy": accuracy / stories,
            "perplexity": perplexity / stories,
            "perplexity_corpus": float(torch.tensor(nll / tokens, dtype=torch.float64).exp()),  # infinite rather than an error
        }

    def _judged(self, module: nn.Module, x: Tensors, y: Tensor, meters: Mapping[str, Meter]) -> tuple[Tensor, Tensor]:
        """Return NLL of every target `[batch, time]` (0 for padding), and whether it was the likeliest token; update the meters."""
        losses, hits = [], []
        for found, target in _in_parts(module, x, y):
            if meters:
                counted = target != self.padding
                _update(meters, found[counted], target[counted])
            losses.append(F.cross_entropy(found, target, ignore_index=self.padding, reduction="none"))
            hits.append(found.argmax(-1) == target)
        return torch.cat(losses).view_as(y), torch.cat(hits).view_as(y)


@dataclass(frozen=True)
class Continuation(Language):
    """Next-token prediction where targets are the inputs themselves, as `labels` of transformers are: each token's is the one after it."""

    def loss(self, module: nn.Module, x: Tensors, y: Tensor, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        return super().loss(module, x, self._next(y), temperature=temperature, twice=twice)

    def evaluate(self, module: nn.Module, x: Tensors, y: Tensor, batch_size: int) -> Metrics:
        return super().evaluate(module, x, self._next(y), batch_size)

    def _next(self, y: Tensor) -> Tensor:
        return F.pad(y[..., 1:], (0, 1), value=self.padding)


@dataclass(frozen=True)
class TokenLabels(Prediction):
    """A label for each token `[batch, time]` (token classification, masked words); those that are −100, padding, do not count."""

    metrics: tuple[str | Metric, ...] = (ACCURACY.name,)

    def loss(self, module: nn.Module, x: Tensors, y: Tensors, *, temperature: float = 1.0, twice: bool = False) -> Tensor:
        return self._mean(logits(trees.called(module, x)) / temperature, y, self.smoothing)

    def judged(self, module: nn.Module, x: Tensors, y: Tensors) -> tuple[float, Any]:
        output = logits(trees.called(module, x))
        return float(self._mean(output, y)), output

    def check_count(self, module: nn.Module, x: Tensors, y: Tensors) -> None:
        """Batches differ in how many labels count."""
        return

    def shown(self, output: Any, y: Tensors) -> tuple[Any, Any]:
        return output.flatten(0, 1), y.flatten()

    def weight(self, y: Tensors) -> int:
        return int((y != IGNORED).sum())

    def _mean(self, output: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean loss of the labels that count; 0 if none does."""
        target = y.long().flatten()
        total = F.cross_entropy(output.flatten(0, 1), target, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        return total / (target != IGNORED).sum().clamp(min=1)


def _in_parts(module: nn.Module, x: Tensors, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits `[rows, vocabulary]` and targets `[rows]` of some tokens at a time, if the model allows it."""
    if not isinstance(module, Projecting):
        yield logits(trees.called(module, x)).flatten(0, 1), y.flatten()
        return
    matrix = module.output_matrix
    rows = rows_at_once(len(matrix))
    for hidden, target in zip(module.hidden(x).flatten(0, 1).split(rows), y.flatten().split(rows), strict=True):
        yield hidden @ matrix.t(), target


def batches(module: nn.Module, x: Tensors, y: Tensors, batch_size: int) -> Iterator[tuple[Tensors, Tensors, int]]:
    """Yield inputs and targets in order, with their number of samples; the module is in evaluation mode, without gradients."""
    with training(module, False), torch.no_grad():
        for inputs, targets in zip(trees.split(x, batch_size), trees.split(y, batch_size), strict=True):
            yield trees.opened(inputs), trees.opened(targets), trees.count(targets)
