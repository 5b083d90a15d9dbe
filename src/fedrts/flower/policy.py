"""The site owner's limits, checked before an experiment can do harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

from fedrts.config import Experiment
from fedrts.errors import InputError
from fedrts.flower.consent import DeclinedError
from fedrts.flower.host import Limits

_COPIES = 8
"""Copies of a model that a client holds at most: weights, those received, gradient, the optimiser's two, the method's two, one to send."""
_TENSORS = 10_000
"""Tensors of a model at most: beyond that, the modules themselves would take the memory."""


def check_training(experiment: Experiment, limits: Limits) -> None:
    """Check that the local training is not too long."""
    epochs = experiment.train.epochs
    if limits.max_epochs and epochs > limits.max_epochs:
        raise DeclinedError(f"train.epochs = {epochs} is more than this site allows: --max-epochs {limits.max_epochs}")


def check_rows(rows: Sequence[int], batch: int, limits: Limits) -> None:
    """Check that every client's update has enough `rows`, in large enough batches."""
    for count in rows:
        used = count // batch * batch or count
        if used < limits.min_samples:
            raise DeclinedError(
                f"{used} of the {count} rows here would enter an update with train.batch_size = {batch}, and this site wants "
                f"at least --min-samples {limits.min_samples}",
                "too few of its rows would enter an update (--min-samples)",
            )
        if min(batch, count) < limits.min_batch:
            raise DeclinedError(f"train.batch_size = {batch} is less than this site allows: --min-batch {limits.min_batch}")


def built(build: Callable[[], nn.Module], limits: Limits) -> nn.Module:
    """Return the model that `build` makes if it is not too large; it is first built without memory for its numbers."""
    try:
        with _counted(limits), torch.device("meta"):
            build()
    except DeclinedError:
        raise
    except InputError:  # it needs its numbers at once, or cannot be built at all: the second try tells
        pass
    with _counted(limits):
        return build()


@dataclass
class _Count:
    limits: Limits
    numbers: int = 0
    tensors: int = 0

    def __call__(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None or nn.parameter.is_lazy(tensor):
            return
        self.numbers, self.tensors = self.numbers + tensor.numel(), self.tensors + 1
        most, memory = self.limits.max_parameters, self.limits.max_memory
        if most and (self.numbers > most or self.tensors > _TENSORS):
            raise DeclinedError(f"the experiment's model has more than the {most:,} parameters that this site allows: --max-parameters")
        if memory and self.numbers * 4 * _COPIES > memory:
            raise DeclinedError(f"to train the experiment's model takes more than the {memory:,} bytes that this site allows: --max-memory")


@contextlib.contextmanager
def _counted(limits: Limits) -> Iterator[None]:
    """Count the parameters of every module built during the block."""
    count = _Count(limits)
    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def bound_memory(size: int) -> None:
    """Limit this process's memory to this many bytes: exceeding it raises an error instead of taking down the machine."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if most == resource.RLIM_INFINITY else min(size, most), most))
