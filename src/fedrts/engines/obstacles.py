"""Why a model's clients cannot train side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedrts.client import Workbench
from fedrts.engines.kernels import Kernel, Objective
from fedrts.sparse.layout import Layout

_FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)


def obstacle(bench: Workbench, objective: Objective, kernel: Kernel) -> str | None:
    """What stands in the way of clients side by side; None if nothing does."""
    if has_counters(bench.module, bench.layout):
        return "the model counts in buffers that are no floating-point numbers"
    weights, x, y = sample(bench)
    was_training = bench.module.training
    bench.module.train()
    try:
        if (name := random_operation(objective, weights, x, y)) is not None:
            return f"the model draws random numbers while it trains, as dropout does ({name})"
        kernel(*(tensor.expand(2, *tensor.shape).clone() for tensor in (weights, x, y)))
    except _FAILURES as error:
        return (str(error).strip() or type(error).__name__).partition("\n")[0]
    finally:
        bench.module.train(was_training)
    return None


def sample(bench: Workbench) -> tuple[Tensor, Tensor, Tensor]:
    """The model's weights `[n]` and a small batch."""
    rows = torch.arange(min(2, bench.training.batch_size, len(bench.data.y)), device=bench.gradient.device)
    return bench.layout.flatten(bench.module.state_dict()), *bench.data.training_batch(rows, 0)


class _Watch(TorchDispatchMode):
    """Remembers the first operation that draws random numbers."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None and draws(func, args, kwargs or {}):
            self.found = func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does this call of an operation draw random numbers? Those that can drop (attention) do so at a rate above 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    rates = [given.get(name, 0.0) for name in ("dropout_p", "dropout") if name in names]
    return not rates or any(rates)


def random_operation(objective: Objective, weights: Tensor, x: Tensor, y: Tensor) -> str | None:
    """The name of an operation of the forward pass that draws random numbers: side by side clients would draw other ones."""
    parameters = objective.layout.parameters
    device = [weights.device] if weights.device.type == "cuda" else []
    watch = _Watch()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(device), watch:
        objective.loss(weights[:parameters].clone(), weights[parameters:].clone(), x, y)
    return watch.found


def has_counters(module: nn.Module, layout: Layout) -> bool:
    """May buffers outside the vector matter to training? They are the same in every step here; BatchNorm's own count does not matter
    unless it averages over all batches.
    """
    norms = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    harmless = {f"{name}.num_batches_tracked".lstrip(".") for name, part in norms if part.momentum is not None}
    integers = {name for name, value in layout.constants.items() if not value.is_floating_point() and value.dtype != torch.bool}
    return bool(integers - harmless)
