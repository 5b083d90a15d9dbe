"""Programs recorded once and played back: on a CPU much of a small model's step is not arithmetic but Python and autograd.

A recording is the plain list of operations that a kernel carries out on tensors of one form. It needs neither the model nor autograd, so
several threads may play it at the same time, and it lets go of the interpreter in every operation.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedrts.engines.kernels import Gradients, Kernel

Program = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

WORTH_RECORDING = 8
"""Calls after which a form is recorded: recording takes as long as some dozens of calls, and some forms (short batches) come rarely."""

_aten = torch.ops.aten
_CHANGE_AT_MOST_THE_SHAPE = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.alias.default,
    _aten.detach.default,
}


class Recorded:
    """A kernel for several threads that plays back what it has done before."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.label, self.objective = kernel, kernel.label, kernel.objective
        self._calls: Counter[object] = Counter()
        self._programs: dict[object, Program] = {}
        self._model = threading.Lock()

    def __call__(self, weights: Tensor, x: Tensor, y: Tensor) -> Gradients:
        form = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (weights, x, y))
        program = self._programs.get(form)
        if program is None:
            with self._model:  # the model serves one thread at a time
                program = self._programs.get(form) or self._record(form, weights, x, y)
        return Gradients(*program(weights, x, y))

    def _record(self, form: object, weights: Tensor, x: Tensor, y: Tensor) -> Program:
        """The recording of a form; for its first calls, and if it cannot be recorded, the very result of the kernel."""
        self._calls[form] += 1
        if self._calls[form] == WORTH_RECORDING:
            try:
                self._programs[form] = recorded(self.kernel, weights, x, y)
                return self._programs[form]
            except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
                pass
        found = self.kernel(weights, x, y)
        return lambda *_: found


def recorded(kernel: Kernel, weights: Tensor, x: Tensor, y: Tensor) -> Program:
    """The operations of one call of a `kernel`, as a program for tensors of the same form."""
    program = make_fx(lambda *tensors: tuple(kernel(*tensors)))(weights, x, y)
    lean(program)
    return program.forward


def lean(program: GraphModule) -> None:
    """Without operations that change nothing: vmap leaves many."""
    for node in program.graph.nodes:
        if node.target in _CHANGE_AT_MOST_THE_SHAPE or (node.target is _aten.mul.Scalar and node.args[1] == 1):
            before, after = node.args[0].meta["val"], node.meta["val"]
            if (before.shape, before.dtype) == (after.shape, after.dtype):
                node.replace_all_uses_with(node.args[0])
    program.graph.eliminate_dead_code()
    program.recompile()
