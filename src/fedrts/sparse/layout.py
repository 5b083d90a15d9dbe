"""A model as one flat vector: prunable weights first, then the dense parameters, then the buffers.

`P` is the number of prunable weights, `n` the length of the vector. Tied tensors occur once. Buffers that are not floating point
(BatchNorm's `num_batches_tracked`) or not finite (attention masks) are no part of it: they are constants that every client starts from.
Nor are frozen parameters (a pretrained base under adapters): everybody has them, nobody changes them, and they never travel.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from fedrts.errors import InputError
from fedrts.sparse.arms import LINK, ArmBlock, Layers, block_of, places

Shape = Sequence[int]
Prunable = Callable[[str, Tensor], bool]
"""A user's own rule: does the parameter of this name take part in pruning?"""

_NORMALISATION = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Entry:
    """One tensor of the model inside the flat vector."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    block: ArmBlock | None = None
    """Output and input channels of an arm; None: every link is one."""

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The layer's shape in arms."""
        return self.shape if self.block is None else (self.shape[0] // self.block[0], self.shape[1] // self.block[1])


@dataclass(frozen=True)
class Layout:
    """The order of a module's tensors in the flat vector."""

    layers: tuple[Entry, ...]
    """Prunable tensors; entry `l` has `n^l` weights."""
    dense: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    frozen: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Parameters that are neither trained nor pruned, by all their names: the module's own tensors."""

    @staticmethod
    def of(module: nn.Module, prunable: Prunable | None = None, prune_output: bool = False, unit: str = LINK) -> Layout:
        """Build the layout of `module` in arms of a `unit` (see `sparse.arms`); `prunable` replaces the default rule (see
        `default_rule`).
        """
        rule = prunable or default_rule(module, prune_output)
        layers: list[Entry] = []
        dense: list[Entry] = []
        frozen: dict[str, Tensor] = {}
        for names, parameter in _grouped(module.named_parameters(remove_duplicate=False)):
            pruned = rule(names[0], parameter)
            if not pruned and not parameter.requires_grad:
                frozen |= dict.fromkeys(names, parameter)
                continue
            if not parameter.is_floating_point():
                raise InputError(f"parameter '{names[0]}' is {parameter.dtype}: only floating-point parameters can be trained")
            shape = tuple(parameter.shape)
            if pruned:
                layers.append(Entry(names, shape, block_of(unit, shape)))
            else:
                dense.append(Entry(names, shape))
        persistent = module.state_dict(keep_vars=True)
        buffers = [
            (names, buffer)
            for names, buffer in _grouped((n, b) for n, b in module.named_buffers(remove_duplicate=False) if n in persistent)
        ]
        return Layout(
            layers=tuple(layers),
            dense=tuple(dense),
            buffers=tuple(Entry(names, tuple(b.shape)) for names, b in buffers if _is_statistic(b)),
            constants={name: b.detach().clone() for names, b in buffers if not _is_statistic(b) for name in names},
            frozen=frozen,
        )

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return self.layers + self.dense + self.buffers

    @cached_property
    def parameter_entries(self) -> tuple[Entry, ...]:
        return self.layers + self.dense

    @cached_property
    def sizes(self) -> Layers:
        """`n^l`: the weights of each prunable layer, and their grouping into arms."""
        sizes = [entry.size for entry in self.layers]
        if all(entry.block is None for entry in self.layers):
            return Layers(sizes)
        grids = [math.prod(entry.grid) for entry in self.layers]
        arm_of = [places(entry.shape, entry.block) + first for entry, first in zip(self.layers, starts(grids), strict=False)]
        return Layers(sizes, [size // arms for size, arms in zip(sizes, grids, strict=True)], torch.cat(arm_of))

    @cached_property
    def arms(self) -> int:
        """`U`: the number of arms; equals the number of prunable weights if every link is an arm."""
        return sum(self.sizes.arms)

    @cached_property
    def links(self) -> int:
        """`P`: the number of prunable weights."""
        return sum(self.sizes)

    @cached_property
    def parameters(self) -> int:
        """`N_all`: prunable and dense parameters, counting tied ones once and excluding frozen ones."""
        return self.links + sum(entry.size for entry in self.dense)

    @cached_property
    def length(self) -> int:
        """`n`: the length of the vector, parameters and buffers."""
        return self.parameters + sum(entry.size for entry in self.buffers)

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint, equal for two layouts exactly when their vectors mean the same."""
        text = repr([(kind, e.names, e.shape) for kind in ("layers", "dense", "buffers") for e in getattr(self, kind)])
        if self.sizes.grouped:
            text += repr([entry.block for entry in self.layers])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def variances(self) -> list[slice]:
        """Positions of BatchNorm's running variances among the buffers (the last part of the vector)."""
        begin = starts([entry.size for entry in self.buffers])
        return [slice(a, b) for entry, a, b in zip(self.buffers, begin, begin[1:], strict=False) if entry.name.endswith("running_var")]

    def blocks(self) -> list[list[int]]:
        """The layers by block, from input to output: neighbours whose names agree up to the first part that ends with a digit
        (`layer1`, `h.0`); a layer without such a part is alone.

        Layers alone in their block (a stem, an embedding) join the next one, the last the one before, where there are larger blocks at all.
        """
        runs = groupby(range(len(self.layers)), key=lambda index: _block(self.layers[index].name))
        groups = [list(members) for _, members in runs]
        if len(groups) == len(self.layers):
            return groups
        merged: list[list[int]] = []
        alone: list[int] = []
        for members in groups:
            if len(members) == 1:
                alone += members
            else:
                merged.append([*alone, *members])
                alone = []
        merged[-1] += alone
        return merged

    def views(self, vector: Tensor, entries: Sequence[Entry] | None = None) -> dict[str, Tensor]:
        """The tensors of `entries` (default: all, of a vector `[n]`) by first name, as views of `vector`.

        Made by one `split`, which vmap and autograd take well.
        """
        entries = self.entries if entries is None else entries
        parts = vector.split([entry.size for entry in entries])
        return {entry.name: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)}

    def state_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a state dict for `load_state_dict(strict=True)`: copies, with tied names and constants."""
        views = self.views(vector.detach().cpu())
        tensors = {name: views[entry.name].clone() for entry in self.entries for name in entry.names}
        return tensors | {name: value.detach().cpu().clone() for name, value in (*self.constants.items(), *self.frozen.items())}

    def by_name(self, links: Tensor) -> dict[str, Tensor]:
        """Return a vector over the prunable weights `[P]` (a mask, a posterior) as tensors by parameter name."""
        parts = links.detach().cpu().split(list(self.sizes))
        return {entry.name: part.reshape(entry.shape).clone() for entry, part in zip(self.layers, parts, strict=True)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector `[n]` of a state dict; inverse of `views`."""
        for entry in self.entries:
            if entry.name not in tensors:
                raise InputError(f"tensor '{entry.name}' is missing")
            if tuple(tensors[entry.name].shape) != entry.shape:
                raise InputError(f"tensor '{entry.name}' has shape {tuple(tensors[entry.name].shape)}, the model's is {entry.shape}")
        if not self.entries:
            return torch.zeros(0)
        dtype = tensors[self.entries[0].name].dtype
        return torch.cat([tensors[entry.name].detach().reshape(-1).to(dtype) for entry in self.entries])

    def bind(self, module: nn.Module, vector: Tensor, gradient: Tensor | None = None) -> None:
        """Let `module` live inside `vector [n]`: its parameters and buffers become views of it, its gradients of `gradient [N_all]`.

        Training the module then changes the vector in place, and one operation on the vector reaches every layer.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        gradients = None if gradient is None else gradient.split([e.size for e in self.parameter_entries])
        for index, (name, view) in enumerate(self.views(vector).items()):
            tensor: Tensor = parameters[name] if name in parameters else buffers[name]
            tensor.data = view
            if name in parameters:
                tensor.grad = None if gradients is None else gradients[index].view(view.shape)
        for name, value in self.constants.items():
            buffers[name].copy_(value)

    def unbind(self, module: nn.Module) -> None:
        """Detach `module` from its numbers until it is bound again, so that holding it holds no vector."""
        held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        for entry in self.entries:
            tensor = held[entry.name]
            tensor.grad = None
            tensor.data = tensor.new_empty(0)


def default_rule(module: nn.Module, prune_output: bool = False) -> Prunable:
    """Everything is prunable except biases, normalisation layers, the output layer (as in the paper's set-up) and what is frozen."""
    spared = {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
    for part in module.modules():
        if isinstance(part, _NORMALISATION):
            spared.update(id(p) for p in part.parameters(recurse=False))
    output = None if prune_output else output_layer(module)
    if output is not None:
        spared.update(id(p) for p in output.parameters())
    return lambda name, parameter: parameter.dim() >= 2 and not name.endswith("bias") and id(parameter) not in spared


def output_layer(module: nn.Module) -> nn.Module | None:
    """The module's `output_layer` attribute (a module, a name or None) or else its last registered Linear or Conv.

    A last layer whose weight is tied (a language model's head) is no output layer of its own: the tied tensor is pruned once.
    """
    if hasattr(module, "output_layer"):
        named = module.output_layer
        return module.get_submodule(named) if isinstance(named, str) else named if isinstance(named, nn.Module) else None
    weighted = [part for part in module.modules() if isinstance(part, _WEIGHTED)]
    if not weighted:
        return None
    owners = sum(p is weighted[-1].weight for _, p in module.named_parameters(remove_duplicate=False))
    return weighted[-1] if owners == 1 else None


def starts(sizes: Sequence[int]) -> list[int]:
    """Return where each layer begins: `[0, n^1, n^1+n^2, …]`, one longer than `sizes`."""
    return [0, *accumulate(sizes)]


def _block(name: str) -> str:
    """Return the block of a layer: its name up to the first part that ends with a digit, or all of it."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part[-1:].isdigit()), len(parts))
    return ".".join(parts[: numbered + 1])


def _is_statistic(buffer: Tensor) -> bool:
    """Whether training may change the buffer and averaging may mix it; counters and masks of −∞ are constants."""
    return buffer.is_floating_point() and bool(torch.isfinite(buffer).all())


def _grouped(named: object) -> list[tuple[tuple[str, ...], Tensor]]:
    """(names, tensor) with the names of one tied tensor together, in order of first appearance."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:  # type: ignore[attr-defined]
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in groups.values()]
