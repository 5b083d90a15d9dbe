"""Programs recorded once and played back: on a CPU much of a small model's step is not arithmetic but Python and autograd.

A recording is the plain list of operations that a kernel carries out on tensors of one form. It needs neither the model nor autograd, so
several threads may play it at the same time, and it lets go of the interpreter in every operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from fedrts.engines.kernels import Gradients, Kernel
from fedrts.sparse.dispatch import Watching
from fedrts.trees import Tensors

Program = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""Weights, and the tensors of a batch one after the other → `Gradients`."""

_aten = torch.ops.aten
_HANDED_OUT = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
"""What takes numbers out of a tensor without an operation that a recorder sees."""
_CHANGE_AT_MOST_THE_SHAPE = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.alias.default,
    _aten.detach.default,
}


class Recorded:
    """A kernel for several threads that replays what it has recorded.

    A form is recorded when it first comes, not when it is worth while: a recording rounds otherwise than its kernel, and which of the two
    a batch meets must not depend on what came before (a resumed run, another thread).
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.label, self.objective = kernel, kernel.label, kernel.objective
        self._programs: dict[object, Program] = {}
        self._model = threading.Lock()
        self._form: TreeSpec | None = None
        """How batches are made of tensors, the same for all of one data set."""

    def __call__(self, weights: Tensor, x: Tensors, y: Tensors) -> Gradients:
        batch, self._form = tree_flatten((x, y))
        form = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in (weights, *batch))
        program = self._programs.get(form)
        if program is None:
            with self._model:  # the model serves one thread at a time
                program = self._programs.get(form) or self._program(weights, *batch)
                self._programs[form] = program
        return Gradients(*program(weights, *batch))

    def _program(self, weights: Tensor, *batch: Tensor) -> Program:
        """Return the recording of a form, or the kernel itself if it cannot be recorded."""
        try:
            return recorded(self.kernel, weights, *self._halves(batch))
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
            return self._plain
        except Exception:
            if not self._programs:
                raise
            return self._plain

    def _plain(self, weights: Tensor, *batch: Tensor) -> Gradients:
        with self._model:
            return self.kernel(weights, *self._halves(batch))

    def _halves(self, batch: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Return inputs and targets of these tensors."""
        assert self._form is not None
        x, y = tree_unflatten(batch, self._form)
        return x, y


def recorded(kernel: Kernel, weights: Tensor, x: Tensors, y: Tensors) -> Program:
    """Record the operations of one call of a `kernel` as a program for tensors of the same form."""
    recorder = Recorder([weights, *tree_flatten((x, y))[0]])
    with recorder, _Sealed():
        found = kernel(weights, x, y)
    return recorder.program(found)


class _Sealed(TorchFunctionMode):
    """Refuses to hand out a tensor's numbers: Python or NumPy would compute with those of the recorded batch for ever."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HANDED_OUT:
            raise ValueError("what happens depends on the numbers in a tensor")
        return func(*args, **(kwargs or {}))


class RecordingError(Exception):
    """The model does something that a recording cannot repeat."""


class Recorder(Watching):
    """Writes down every operation on tensors, below autograd and vmap.

    What `make_fx` does, without the second that its imports take. Tensors are known by identity, so all of them are held.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self._constants = Graph(), dict[str, Tensor]()
        self._known: dict[int, tuple[Tensor, Node]] = {}
        for place, tensor in enumerate(inputs):
            self._know(tensor, self.graph.placeholder(f"input_{place}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            raise ValueError("what happens depends on the numbers in a tensor")
        found = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":  # marks of a profiler compute nothing, and nn.DataParallel makes them too
            return found
        node = self.graph.call_function(func, *tree_map_only(Tensor, self._node, (args, kwargs or {})))
        if isinstance(found, Tensor):
            self._know(found, node)
        elif isinstance(found, tuple | list):
            for place, part in enumerate(found):
                if isinstance(part, Tensor):
                    self._know(part, self.graph.call_function(getitem, (node, place)))
        return found

    def program(self, outputs: Sequence[Tensor]) -> Program:
        """Return the recording as a function from inputs to `outputs`."""
        self.graph.output(tuple(map(self._node, outputs)))
        lean(self.graph)
        try:
            program: Program = GraphModule(self._constants, self.graph).forward
        except SyntaxError as error:  # an argument is an object that no text makes again
            text = (error.text or "").partition(";")[0].strip()
            raise RecordingError(f"an operation of the model cannot be recorded ({text})") from error
        return program

    def _know(self, tensor: Tensor, node: Node) -> None:
        node.meta["form"] = (tensor.shape, tensor.dtype)
        self._known[id(tensor)] = (tensor, node)

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._known:  # it was there before
            name = f"constant_{len(self._constants)}"
            self._constants[name] = tensor
            self._know(tensor, self.graph.create_node("get_attr", name))
        return self._known[id(tensor)][1]


def lean(graph: Graph) -> None:
    """Remove operations that change nothing or only move numbers; vmap and autograd leave many."""
    for node in graph.nodes:
        idle = node.target in _CHANGE_AT_MOST_THE_SHAPE or (node.target is _aten.mul.Scalar and node.args[1] == 1)
        if idle and _first(node).meta["form"] == node.meta["form"]:
            node.replace_all_uses_with(_first(node))
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if _is_transposed(node) and _first(node).target is _aten.bmm.default and len(_first(node).users) == 1:
            node.replace_all_uses_with(_flipped(graph, node))
        elif node.target is _aten.clone.default and "new" in _first(node).meta:
            node.replace_all_uses_with(_first(node))
    graph.eliminate_dead_code()


def _flipped(graph: Graph, node: Node) -> Node:
    """(A B)ᵀ as Bᵀ Aᵀ, in the place of `node`: the gradient of a weight comes out as the weight lies, and need not be copied."""
    first, second = (factor for factor in _first(node).args if isinstance(factor, Node))
    with graph.inserting_before(node):
        product = graph.call_function(_aten.bmm.default, (_transposed(graph, second), _transposed(graph, first)))
    product.meta |= {"form": node.meta["form"], "new": True}
    return product


def _transposed(graph: Graph, node: Node) -> Node:
    if _is_transposed(node):
        return _first(node)
    transposed = graph.call_function(_aten.transpose.int, (node, 1, 2))
    (batch, rows, columns), dtype = node.meta["form"]
    transposed.meta["form"] = (torch.Size([batch, columns, rows]), dtype)
    return transposed


def _is_transposed(node: Node) -> bool:
    return node.target is _aten.transpose.int and node.args[1:] == (1, 2) and len(node.meta["form"][0]) == 3


def _first(node: Node) -> Node:
    """Return the tensor that an operation works on."""
    tensor = node.args[0]
    assert isinstance(tensor, Node)
    return tensor
