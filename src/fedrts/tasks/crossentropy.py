"""Cross-entropy of a linear layer over many classes in chunks of rows, so that all logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

LOGITS_AT_ONCE = 2**24
"""64 MiB in float32, of which a few copies exist for a moment."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, ignored: int) -> Tensor:
    """Mean cross-entropy of `hidden [n, width] @ weight [classes, width]ᵀ` over the targets `[n]` other than `ignored`.

    Differentiable once: both gradients are made in the forward pass, chunk by chunk, and are all that it stores.
    """
    loss, *_ = _LinearCrossEntropy.apply(hidden, weight, target, ignored)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def rows_at_once(classes: int) -> int:
    """Return the number of rows whose logits may exist at once."""
    return max(1, LOGITS_AT_ONCE // classes)


class _LinearCrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True  # nothing below writes into a tensor in place, which vmap asks for

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, and its gradients `[n, width]` and `[classes, width]`."""
        counted = target != ignored
        share = (counted.to(hidden.dtype) / counted.sum()).unsqueeze(-1)  # what each row adds to the mean
        label = target.where(counted, 0).unsqueeze(-1)
        shared = hidden * share
        losses, pulls = [], []
        to_weight = torch.zeros_like(weight)
        rows = rows_at_once(weight.shape[0])
        for part, labels, part_shared in zip(hidden.split(rows), label.split(rows), shared.split(rows), strict=True):
            logits = (part @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
            log_p = logits.log_softmax(-1)
            losses.append(-log_p.gather(-1, labels))
            hit = -torch.ones_like(losses[-1])
            error = log_p.exp().scatter_add(-1, labels, hit).to(hidden.dtype)  # one entry a row, so the same bits every time
            pulls.append(error @ weight)
            to_weight = torch.addmm(to_weight, error.t(), part_shared)
        loss = (torch.cat(losses).where(counted.unsqueeze(-1), 0.0) * share).sum()
        return loss, torch.cat(pulls) * share, to_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:], *inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight, hidden, weight = ctx.saved_tensors
        once: Callable[..., Tensor] = _Once.apply
        return grad * once(to_hidden, hidden, weight), grad * once(to_weight, hidden, weight), None, None


class _Once(torch.autograd.Function):
    """A gradient that hides its dependence on its inputs from autograd: differentiating it is an error, not zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("this loss can be differentiated only once: ask for task.loss(module, x, y, twice=True)")
