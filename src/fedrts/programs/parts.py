"""Reading a module as a list of parts that the kernels support: links, norms, ReLU, sums, pooling, flatten."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedrts.errors import reason
from fedrts.sparse.mode import training

Pair = tuple[int, int]
Extent = tuple[int, ...]


class UnknownPartError(Exception):
    """A part of the model that the kernels do not support; the message names it."""


@dataclass(frozen=True)
class KnownPart:
    """A computation on earlier parts' values."""

    inputs: tuple[int, ...] = ()
    """Places of earlier parts."""
    shape: Extent = ()
    """Shape of its value without samples: `(channels, height, width)` or `(features,)`."""


@dataclass(frozen=True)
class InputPart(KnownPart):
    pass


@dataclass(frozen=True)
class LinksPart(KnownPart):
    """A linear layer or a convolution; its parameters by name."""

    weight: str = ""
    bias: str | None = None
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1


@dataclass(frozen=True)
class NormPart(KnownPart):
    """Normalisation over the batch or, with `groups`, over groups of a sample's channels."""

    gamma: str | None = None
    beta: str | None = None
    mean: str | None = None
    variance: str | None = None
    groups: int = 0
    eps: float = 1e-5
    momentum: float = 0.1


@dataclass(frozen=True)
class ReluPart(KnownPart):
    in_place: bool = False


@dataclass(frozen=True)
class SumPart(KnownPart):
    in_place: bool = False


@dataclass(frozen=True)
class PoolPart(KnownPart):
    """The mean or the maximum of every window."""

    window: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    mean: bool = False
    with_padding: bool = True


@dataclass(frozen=True)
class MeanPart(KnownPart):
    """The mean over all positions."""


@dataclass(frozen=True)
class FlattenPart(KnownPart):
    pass


def read(module: nn.Module, x: Tensor) -> list[KnownPart]:
    """Read the parts of `module` in the order of computation, the input first; `x` are some inputs `[m, …]`.

    An `UnknownPartError` says what the kernels do not know.
    """
    alone = not any(module.children())  # a layer by itself is one part, and not what it is made of
    module = nn.Sequential(module) if alone else module
    _check_layers(module)
    with training(module, True):
        graph, modes = _traced(module), _modes(module)
    with training(module, False):
        if str(_traced(module).graph) != str(graph.graph):
            raise UnknownPartError("the model computes otherwise in training than in evaluation")
        if (name := next((name for name, mode in _modes(module).items() if mode == modes[name]), None)) is not None:
            raise UnknownPartError(f"'{name}', which keeps its mode in training and in evaluation")
        shapes = _Shapes(graph)
        with torch.no_grad():
            shapes.run(x)
    return _Reading(module, shapes.found, len(x), alone).parts(graph.graph)


def _traced(module: nn.Module) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(module)
    except Exception as error:  # whatever Python code a model is
        raise UnknownPartError(f"what the model does depends on more than its layers ({reason(error)})") from error


def _modes(module: nn.Module) -> dict[str, bool]:
    """Return which layers are in training mode, of those whose computation depends on it."""
    return {name: part.training for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._NormBase)}


def _check_layers(module: nn.Module) -> None:
    """Refuse code that PyTorch runs beside a layer (hooks), which reading the layers would miss."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise UnknownPartError(f"a hook at '{name}'" if name else "a hook of the model")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise UnknownPartError(f"a hook of '{name}'")


class _Shapes(fx.Interpreter):
    """Records the shape of every value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.found: dict[fx.Node, Extent] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n] = tuple(value.shape)
        return value


class _Reading:
    """A module while it is read."""

    def __init__(self, module: nn.Module, shapes: Mapping[fx.Node, Extent], samples: int, alone: bool) -> None:
        self.modules, self.shapes, self.samples, self.alone = dict(module.named_modules()), shapes, samples, alone
        self.places: dict[fx.Node, int] = {}
        self.found: list[KnownPart] = []

    def parts(self, graph: fx.Graph) -> list[KnownPart]:
        for node in graph.nodes:
            if node.op == "output":
                last = node.args[0]
                if not isinstance(last, fx.Node) or last not in self.places:
                    raise UnknownPartError("the model gives something else than one tensor")
                if self.places[last] != len(self.found) - 1:
                    raise UnknownPartError("the model computes something that it does not give")
            elif node.users or node.op == "placeholder":
                self._add(node)
            elif node in self.shapes and node.op != "get_attr":  # it may change its input, or statistics
                raise UnknownPartError(f"{self._called(node)}, whose value the model does not use")
        self._check_changes_in_place()
        return self.found

    def _add(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            raise UnknownPartError(f"'{node.target}', which is used outside a layer")
        if node not in self.shapes:  # numbers: the sizes that a view asks for
            return
        if self.shapes[node][:1] != (self.samples,):
            raise UnknownPartError(f"{self._called(node)} mixes samples")
        part = self._part(node)
        if part is None:
            self.places[node] = self.places[node.all_input_nodes[0]]
            return
        self.places[node] = len(self.found)
        self.found.append(replace(part, inputs=self._sources(node), shape=self.shapes[node][1:]))

    def _part(self, node: fx.Node) -> KnownPart | None:
        """Return the part of a node; None: it changes nothing."""
        if node.op == "placeholder":
            if self.found:
                raise UnknownPartError("the model takes several inputs")
            return InputPart()
        if node.op == "call_module":
            layer = self.modules[str(node.target)]
            reader = MODULES.get(type(layer))
            adaptive = type(layer) is nn.AdaptiveAvgPool2d
            part = self.adapted(node, layer.output_size) if adaptive else reader(layer, self._prefix(node)) if reader else None
        else:
            known = FUNCTIONS.get(node.target)
            part = known(self, node) if known else None
        if part is None:
            raise UnknownPartError(self._called(node))
        if isinstance(part, _Same):
            return None
        return self._fitted(part, node)

    def _fitted(self, part: KnownPart, node: fx.Node) -> KnownPart | None:
        """Return the part that the shapes show, which may differ from its name."""
        before, after = (self.shapes[n][1:] for n in (node.all_input_nodes[0], node))
        if isinstance(part, FlattenPart):
            if after != (math.prod(before),):
                raise UnknownPartError(self._called(node))
            return None if before == after else part
        if isinstance(part, PoolPart | MeanPart) and len(before) != 3:
            raise UnknownPartError(f"{self._called(node)} of inputs {list(before)}")
        if isinstance(part, PoolPart) and part.mean and part.window == before[1:] and part.padding == (0, 0):
            return MeanPart()
        if isinstance(part, LinksPart) and len(before) != (1 if type(self.modules[str(node.target)]) is nn.Linear else 3):
            raise UnknownPartError(f"{self._called(node)} of inputs {list(before)}")
        if isinstance(part, SumPart) and {self.shapes.get(n) for n in node.all_input_nodes} != {self.shapes[node]}:
            raise UnknownPartError(f"{self._called(node)} of different shapes")
        return part

    def _sources(self, node: fx.Node) -> tuple[int, ...]:
        if node.op == "placeholder":
            return ()
        sources = node.all_input_nodes if len(node.all_input_nodes) == 2 or not _is_sum(node) else [node.all_input_nodes[0]] * 2
        return tuple(self.places[source] for source in sources if source in self.places)

    def _prefix(self, node: fx.Node) -> str:
        """Return the prefix of the names of a layer's tensors."""
        return "" if self.alone else f"{node.target}."

    def _called(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{self.modules[str(node.target)]} at '{node.target}'"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return f"'{name}' at '{node.name}'"

    def _check_changes_in_place(self) -> None:
        """Check parts that overwrite an input which another part also reads; flattened values stay in place."""
        memory: list[int] = []
        for place, part in enumerate(self.found):
            memory.append(memory[part.inputs[0]] if isinstance(part, FlattenPart) else place)
        readers = Counter(memory[place] for part in self.found if not isinstance(part, FlattenPart) for place in part.inputs)
        for part in self.found:
            if isinstance(part, ReluPart | SumPart) and part.in_place and readers[memory[part.inputs[0]]] > 1:
                raise UnknownPartError(f"a {type(part).__name__.removesuffix('Part')} that changes in place what another part reads")

    def pooled(self, node: fx.Node, mean: bool) -> KnownPart | None:
        """Return a functional pooling as a part."""
        if len(node.args) > 4:
            return None
        given = dict(zip(("window", "stride", "padding"), node.args[1:], strict=False)) | {
            {"kernel_size": "window"}.get(name, name): value for name, value in node.kwargs.items()
        }
        usual = {"ceil_mode": False, "return_indices": False, "dilation": 1, "count_include_pad": True, "divisor_override": None}
        if any(name not in usual or value != usual[name] for name, value in given.items() if name not in ("window", "stride", "padding")):
            return None
        window = _pair(given["window"])
        return PoolPart(window=window, stride=_pair(given.get("stride") or window), padding=_pair(given.get("padding", 0)), mean=mean)

    def adapted(self, node: fx.Node, size: Any) -> KnownPart | None:
        """Return adaptive mean pooling as a part, if all windows are alike."""
        before = self.shapes[node.all_input_nodes[0]][2:]
        if len(before) != 2:
            return None
        wanted = tuple(own if asked is None else asked for own, asked in zip(before, _pair(size), strict=True))
        if any(own % asked for own, asked in zip(before, wanted, strict=True)):
            return None
        window = (before[0] // wanted[0], before[1] // wanted[1])
        return MeanPart() if wanted == (1, 1) else PoolPart(window=window, stride=window, mean=True)

    def averaged(self, node: fx.Node) -> KnownPart | None:
        """Return `mean` over both axes of an image as a part."""
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        rank = len(self.shapes[node.all_input_nodes[0]])
        axes = {dim % rank for dim in dims} if isinstance(dims, tuple | list) else set()
        return MeanPart() if rank == 4 and axes == {2, 3} and not node.kwargs.get("dtype") else None


class _Same(KnownPart):
    """A part that changes nothing."""


def _is_sum(node: fx.Node) -> bool:
    return node.target in (operator.add, operator.iadd, torch.add, "add", "add_")


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple | list) else (value, value)


def _linear(layer: nn.Linear, name: str) -> KnownPart:
    return LinksPart(weight=f"{name}weight", bias=None if layer.bias is None else f"{name}bias")


def _convolution(layer: nn.Conv2d, name: str) -> KnownPart | None:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    return LinksPart(
        weight=f"{name}weight",
        bias=None if layer.bias is None else f"{name}bias",
        kernel=_pair(layer.kernel_size),
        stride=_pair(layer.stride),
        padding=_pair(layer.padding),
        dilation=_pair(layer.dilation),
        groups=layer.groups,
    )


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, name: str) -> KnownPart | None:
    if not layer.track_running_stats or layer.momentum is None:
        return None
    gamma, beta = _affine(layer.affine, name)
    mean, variance = f"{name}running_mean", f"{name}running_var"
    return NormPart(gamma=gamma, beta=beta, mean=mean, variance=variance, eps=layer.eps, momentum=layer.momentum)


def _group_norm(layer: nn.GroupNorm, name: str) -> KnownPart | None:
    if layer.eps <= 0:  # lanes without a sample would be no numbers
        return None
    gamma, beta = _affine(layer.affine, name)
    return NormPart(gamma=gamma, beta=beta, groups=layer.num_groups, eps=layer.eps)


def _affine(affine: bool, name: str) -> tuple[str | None, str | None]:
    return (f"{name}weight", f"{name}bias") if affine else (None, None)


def _max_pool(layer: nn.MaxPool2d, name: str) -> KnownPart | None:
    if layer.ceil_mode or layer.return_indices or _pair(layer.dilation) != (1, 1):
        return None
    return PoolPart(window=_pair(layer.kernel_size), stride=_pair(layer.stride), padding=_pair(layer.padding))


def _average_pool(layer: nn.AvgPool2d, name: str) -> KnownPart | None:
    if layer.ceil_mode or layer.divisor_override is not None:
        return None
    sizes = {"window": _pair(layer.kernel_size), "stride": _pair(layer.stride), "padding": _pair(layer.padding)}
    return PoolPart(**sizes, mean=True, with_padding=layer.count_include_pad)


def _dropout(layer: nn.Dropout | nn.Dropout2d, name: str) -> KnownPart | None:
    return None if layer.p else _Same()


MODULES: dict[type[nn.Module], Callable[[Any, str], KnownPart | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.ReLU: lambda layer, name: ReluPart(in_place=layer.inplace),
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _average_pool,
    nn.Flatten: lambda layer, name: FlattenPart(),
    nn.Identity: lambda layer, name: _Same(),
    nn.Dropout: _dropout,
    nn.Dropout2d: _dropout,
}
"""Layers by their exact type: a subclass may compute otherwise."""


def _relu(reading: _Reading, node: fx.Node) -> KnownPart:
    return ReluPart(in_place=bool(node.kwargs.get("inplace")))


def _sum(reading: _Reading, node: fx.Node) -> KnownPart | None:
    plain = all(isinstance(part, fx.Node) for part in node.args[:2]) and not node.kwargs
    return SumPart(in_place=node.target in (operator.iadd, "add_")) if plain else None


def _flat(reading: _Reading, node: fx.Node) -> KnownPart:
    return FlattenPart()


def _contiguous(reading: _Reading, node: fx.Node) -> KnownPart:
    return _Same()


FUNCTIONS: dict[Any, Callable[[_Reading, fx.Node], KnownPart | None]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), _relu),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _sum),
    **dict.fromkeys((torch.flatten, torch.reshape, "flatten", "view", "reshape"), _flat),
    **dict.fromkeys(("contiguous", "clone"), _contiguous),
    **dict.fromkeys((torch.mean, "mean"), _Reading.averaged),
    F.max_pool2d: lambda reading, node: reading.pooled(node, mean=False),
    F.avg_pool2d: lambda reading, node: reading.pooled(node, mean=True),
    F.adaptive_avg_pool2d: lambda reading, node: reading.adapted(node, node.kwargs.get("output_size", node.args[-1])),
}
