"""Gradients of many clients at once: one vectorised program, or one program per client on parallel streams.

Both take weights `[k, n]` and batches (trees of tensors `[k, m, …]`) and change nothing. Under vmap every operation is one kernel for
all clients, which suits small models; a convolution becomes a grouped one, which does not suit large ones: these run client by client
on parallel streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from fedrts import trees
from fedrts.sparse.layout import Layout
from fedrts.tasks import Task
from fedrts.trees import Tensors

Precision = Literal["float32", "tf32", "bf16"]

FlatLoss = Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensor]]
"""Parameters, BatchNorm's statistics and a batch → loss, and the statistics after it."""

_ADDRESS = 16
"""Bytes: kernels that read several numbers at once need addresses that are multiples of so many."""
STREAMS = 10
"""Programs of clients that run side by side on a GPU."""


class Gradients(NamedTuple):
    """The results of a batch for every client."""

    gradient: Tensor
    """`[k, N_all]`."""
    loss: Tensor
    """`[k]`."""
    statistics: Tensor
    """`[k, b]`: BatchNorm's after the batch."""


class Kernel(Protocol):
    """Computes gradients of k clients."""

    objective: Objective

    @property
    def label(self) -> str: ...

    def __call__(self, weights: Tensor, x: Tensors, y: Tensors) -> Gradients: ...


class Objective(nn.Module):
    """A model with its task as a function of a flat vector, in training mode whatever the mode of the model outside."""

    def __init__(self, module: nn.Module, task: Task, layout: Layout, precision: Precision = "float32") -> None:
        super().__init__()
        self.module, self.task, self.layout = module, task, layout
        self.precision = precision
        counted = counters(module)
        self.constants = {name: None if name in counted else value for name, value in layout.constants.items()}

    def forward(self, x: Tensors, y: Tensors) -> Tensor:
        return self.task.loss(self.module, x, y)

    def loss(self, parameters: Tensor, buffers: Tensor, x: Tensors, y: Tensors) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch at `parameters [N_all]`, and BatchNorm's statistics `[b]` after it, from `buffers [b]`."""
        layout = self.layout
        tensors = layout.views(parameters, layout.parameter_entries)
        statistics = {name: view.clone() for name, view in layout.views(buffers, layout.buffers).items()}  # vmap loses updates of views
        loss = self.loss_of(tensors, statistics, x, y)
        return loss, torch.cat([part.flatten() for part in statistics.values()]) if statistics else buffers.clone()

    def loss_of(self, tensors: dict[str, Tensor], statistics: dict[str, Tensor], x: Tensors, y: Tensors) -> Tensor:
        """Return the loss of a batch with these parameters by name; BatchNorm changes its `statistics` in place."""
        device = trees.leaves(x)[0].device
        constants = {name: None if value is None else value.to(device, copy=True) for name, value in self.constants.items()}
        named: dict[str, Any] = {f"module.{name}": tensor for name, tensor in (tensors | statistics | constants).items()}
        with self.autocast(device):
            loss: Tensor = functional_call(self, named, (x, y))
        return loss

    def leaves(self, parameters: Tensor) -> dict[str, Tensor]:
        """Tensors by name to differentiate by, as the kernels of the precision like them; `parameters [N_all]` are not changed.

        One cast of the whole vector is cheaper than one for every tensor. Vectors (of norms) stay in full precision.
        """
        entries = self.layout.parameter_entries
        full = self.layout.views(parameters, entries)
        short = self.layout.views(parameters.bfloat16(), entries) if self.precision == "bf16" else full
        chosen = {name: self.laid_out(short[name] if tensor.dim() > 1 else tensor) for name, tensor in full.items()}
        return {name: tensor.detach().requires_grad_() for name, tensor in chosen.items()}

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Align every tensor and, on tensor cores, store images and filters with channels last."""
        if self.precision != "float32" and tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.clone(memory_format=torch.channels_last)
        return tensor if tensor.data_ptr() % _ADDRESS == 0 else tensor.clone()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Temporarily make the model take its inputs in the layout and type that the kernels of the precision prefer."""

        def laid_out(_: nn.Module, positions: Any, names: Any) -> Any:
            return tree_map_only(Tensor, self.laid_out, (positions, names))

        hook = self.module.register_forward_pre_hook(laid_out, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Autocast to the precision."""
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def differentiated(loss: FlatLoss, weights: Tensor, parameters: int, x: Tensors, y: Tensors) -> Gradients:
    """Differentiate the first `parameters` of `weights [..., n]`; `loss` returns one number per client."""
    leaf = weights[..., :parameters].detach().requires_grad_()
    with torch.enable_grad():
        found, statistics = loss(leaf, weights[..., parameters:].detach(), x, y)
        (gradient,) = torch.autograd.grad(found.sum(), leaf)  # a client's loss depends on its own weights alone
    return Gradients(gradient, found.detach(), statistics.detach())


class Vectorised:
    """One program for all clients under vmap."""

    label = "vectorised"

    def __init__(self, objective: Objective) -> None:
        self.objective, self._loss = objective, vmap(objective.loss)

    def __call__(self, weights: Tensor, x: Tensors, y: Tensors) -> Gradients:
        with _attention(weights.device):
            return differentiated(self._loss, weights, self.objective.layout.parameters, x, y)


def _attention(device: torch.device) -> AbstractContextManager[object]:
    """Attention as plain products: some of PyTorch's fused CUDA kernels cannot be differentiated under vmap."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()


class OneByOne:
    """One program per client, one after the other, for cores that a larger model keeps busy."""

    label = "streamed"

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, weights: Tensor, x: Tensors, y: Tensors) -> Gradients:
        loss, parameters = self.objective.loss, self.objective.layout.parameters
        parts = [differentiated(loss, own, parameters, trees.at(x, place), trees.at(y, place)) for place, own in enumerate(weights)]
        return Gradients(*(torch.stack(part) for part in zip(*parts, strict=True)))


class Streamed:
    """One program per client on parallel streams; inside a captured graph they become parallel branches."""

    label = "streamed"

    def __init__(self, objective: Objective, device: torch.device, streams: int = STREAMS) -> None:
        self.objective = objective
        self.streams = [torch.cuda.Stream(device) for _ in range(streams)]

    def __call__(self, weights: Tensor, x: Tensors, y: Tensors) -> Gradients:
        parameters = self.objective.layout.parameters
        found = Gradients(torch.empty_like(weights[:, :parameters]), weights.new_empty(len(weights)), weights[:, parameters:].clone())
        main = torch.cuda.current_stream(weights.device)
        for place in range(len(weights)):
            stream = self.streams[place % len(self.streams)]
            if place < len(self.streams):
                stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self._differentiate(
                    weights[place, :parameters], trees.at(x, place), trees.at(y, place), Gradients(*(part[place] for part in found))
                )
        for stream in self.streams[: len(weights)]:
            main.wait_stream(stream)
        return found

    def _differentiate(self, parameters: Tensor, x: Tensors, y: Tensors, into: Gradients) -> None:
        """Write one client's gradient, loss and statistics to their places."""
        objective, layout = self.objective, self.objective.layout
        leaves = objective.leaves(parameters)
        loss = objective.loss_of(leaves, layout.views(into.statistics, layout.buffers), trees.mapped(objective.laid_out, x), y)
        into.loss.copy_(loss.detach())
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for place, gradient in zip(layout.views(into.gradient[: layout.links], layout.layers).values(), gradients, strict=False):
            place.copy_(gradient)
        if layout.dense:  # many small ones
            torch.cat(
                [gradient.flatten().to(parameters.dtype) for gradient in gradients[len(layout.layers) :]], out=into.gradient[layout.links :]
            )


def counters(module: nn.Module) -> set[str]:
    """Return the batch counts that BatchNorm keeps but does not use, by name."""
    norms = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    return {f"{name}.num_batches_tracked".lstrip(".") for name, part in norms if part.momentum is not None}
