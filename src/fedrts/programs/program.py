"""A model that computes only its active links: plans for masks and batch sizes, made on first use, and run.

program = LinkProgram.read(module, layout, task, x, y, isa="avx2")     # an UnknownPartError names what the kernels do not know
losses = program.train(values, mask, batches, rates, Descent(momentum=0.9))      # values [A + n - P] have moved
outputs = program.outputs(values, mask, x)
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts.programs import library
from fedrts.programs.parts import LinksPart, NormPart, UnknownPartError, read
from fedrts.programs.plan import Criterion, Descent, LinkPlan, Places, evaluated, trained
from fedrts.programs.stages import Stage, fused
from fedrts.sparse.layout import Layout, starts
from fedrts.sparse.mask import Mask
from fedrts.tasks import Classification, Prediction, Task, cross_entropy
from fedrts.trees import Tensors

KEPT_PLANS = 8
KEPT_ARENAS = 4
"""Arenas kept per thread: for training, evaluation, and clients with less than a batch."""
EVALUATED_AT_ONCE = 64
"""Samples whose activations are there together in evaluation; more do not stay in a cache."""


@dataclass(frozen=True)
class Feed:
    """A client's batches: rows of a source of samples and targets."""

    source: Tensor
    """float32 `[rows, …]`, as the model reads it."""
    targets: Tensor | None
    """Labels (int64 `[rows]`) or numbers (float32 `[rows, outputs]`); evaluation needs none."""
    rows: Tensor
    """int64 `[steps, samples]`."""

    def __post_init__(self) -> None:
        there = min(len(part) for part in (self.source, self.targets) if part is not None)
        if self.rows.numel() and not 0 <= int(self.rows.min()) <= int(self.rows.max()) < there:
            raise IndexError("a batch has rows that are not there")


@dataclass
class LinkProgram:
    """A model's stages and their plans."""

    layout: Layout
    stages: list[Stage]
    loss: Criterion
    isa: str
    _plans: OrderedDict[tuple[object, ...], LinkPlan] = field(default_factory=OrderedDict, repr=False)
    _own: threading.local = field(default_factory=threading.local, repr=False)
    """Arenas, one a thread."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def read(module: nn.Module, layout: Layout, task: Task, x: Tensors, y: Tensors, isa: str) -> LinkProgram:
        """Read the program of a model for its task; `x` and `y` are some samples."""
        loss = loss_of(task)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            raise UnknownPartError("batches of several tensors")
        if x.dtype != torch.float32 or any(p.dtype != torch.float32 for p in module.parameters()):
            raise UnknownPartError(f"numbers that are {x.dtype}, not float32".replace("torch.", ""))
        stages = fused(read(module, x))
        if not stages[-1].wide:
            raise UnknownPartError(f"outputs of shape {list(stages[-1].shape)}")
        outputs = stages[-1].shape[0]
        if loss.squares and y.shape[1:] != (outputs,):
            raise UnknownPartError(f"targets of shape {list(y.shape[1:])} beside outputs of shape {[outputs]}")
        if not loss.squares and (y.dim() != 1 or y.is_floating_point()):
            raise UnknownPartError("targets that are no labels")
        _check_names(stages, layout)
        return LinkProgram(layout, stages, loss, isa)

    def train(
        self,
        values: Tensor,
        mask: Mask,
        batches: Feed,
        rates: Sequence[float],
        descent: Descent,
        received: Tensor | None = None,
        velocity: Tensor | None = None,
        free: Tensor | None = None,
    ) -> Tensor:
        """Train on `batches`, one step each, with these learning `rates`; the training loss of every step.

        Changes `values` (`Mask.compact`) in place. `received [parameters]` are what the server sent (default: the values), `velocity
        [parameters]` is what momentum remembers and goes on from (default: nothing); where `free [parameters]` is 0, parameters stay.
        """
        parameters = self.parameters(mask)
        if descent.proximal and received is None:
            received = values[:parameters].clone()
        if descent.momentum and velocity is None:
            velocity = torch.zeros(parameters)
        losses, pace = torch.zeros(len(batches.rows)), torch.tensor(rates, dtype=torch.float32)
        plan = self._plan(mask, batches.rows.shape[1], descent)
        self._run(plan, mask, values, batches, losses=losses, rates=pace, received=received, velocity=velocity, free=free)
        return losses

    def gradient(self, values: Tensor, mask: Mask, batches: Feed) -> tuple[Tensor, Tensor]:
        """Return gradient `[parameters]` on the mask and loss of one batch; statistics in `values` change, weights do not."""
        losses, found = torch.zeros(1), torch.zeros(self.parameters(mask))
        self._run(self._plan(mask, batches.rows.shape[1], None), mask, values, batches, losses=losses, gradient=found)
        return found, losses[0]

    def outputs(self, values: Tensor, mask: Mask, x: Tensor) -> Tensor:
        """Return outputs `[m, …]` of inputs `x [m, …]` in evaluation."""
        found = []
        for part in x.split(EVALUATED_AT_ONCE):
            plan = self._plan(mask, len(part), "evaluation")
            out = torch.zeros(len(part), plan.outputs)
            rows = torch.arange(len(part))[None]
            self._run(plan, mask, values, Feed(part.contiguous(), None, rows), outputs=out)
            found.append(out)
        return torch.cat(found)

    def bytes(self, mask: Mask, samples: int, descent: Descent) -> int:
        """Return the bytes of a client in training: arena, index, weights, gradient, and the optimiser's state."""
        plan, parameters = self._plan(mask, samples, descent), self.parameters(mask)
        vectors = 2 + bool(descent.momentum) + bool(descent.proximal)
        return 4 * (plan.arena + len(plan.index) + vectors * parameters)

    def parameters(self, mask: Mask) -> int:
        """The number of active links and dense parameters."""
        return mask.number + self.layout.parameters - self.layout.links

    def _plan(self, mask: Mask, samples: int, use: Descent | str | None) -> LinkPlan:
        key = (mask.fingerprint, samples, use)
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        places = places_of(self.layout, mask)
        plan = evaluated(self.stages, places, samples) if isinstance(use, str) else trained(self.stages, places, samples, self.loss, use)
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _run(self, plan: LinkPlan, mask: Mask, values: Tensor, batches: Feed, **more: Tensor | None) -> None:
        from fedrts_kernels.structures import Context

        if batches.source.shape[1:] != self.stages[0].part.shape:
            raise ValueError(f"inputs of shape {list(batches.source.shape[1:])}: the model was read with {list(self.stages[0].part.shape)}")
        gradient = more.pop("gradient", None)
        if gradient is None:
            gradient = torch.from_numpy(self._room("gradient", self.parameters(mask)))
        held: dict[str, Tensor | None] = {"weights": values, "gradient": gradient, "source": batches.source, "rows": batches.rows}
        held |= {"targets": batches.targets} | more
        kinds = {"rows": torch.int64, "targets": torch.float32 if self.loss.squares else torch.int64}
        for name, tensor in held.items():
            wanted = kinds.get(name, torch.float32)
            if tensor is not None and (tensor.dtype != wanted or not tensor.is_contiguous() or tensor.device.type != "cpu"):
                raise ValueError(f"{name} must be contiguous {wanted} on the CPU")
        arena = self._room((plan.samples, plan.evaluates), plan.arena)
        context = Context(
            arena=arena.ctypes.data,
            index=plan.index.ctypes.data,
            size=math.prod(batches.source.shape[1:]),
            samples=plan.samples,
            steps=len(batches.rows),
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in held.items()},
        )
        library.kernels().run(self.isa, plan.program, context)

    def _room(self, name: object, floats: int) -> NDArray[np.float32]:
        """Return this thread's memory. Plans of one batch size have their borders in the same places, whatever the mask."""
        rooms: dict[Any, NDArray[np.float32]] = self._own.__dict__.setdefault("rooms", {})
        if name not in rooms or len(rooms[name]) < floats:
            while len(rooms) >= KEPT_ARENAS:
                del rooms[next(iter(rooms))]
            whole = np.zeros(floats + 16, np.float32)
            start = -whole.ctypes.data % 64 // 4
            rooms[name] = whole[start : start + floats]
        return rooms[name]


class Evaluated(nn.Module):
    """A model in evaluation, in kernels that compute only its active links."""

    def __init__(self, program: LinkProgram, values: Tensor, mask: Mask) -> None:
        super().__init__()
        self.program, self.values, self.mask = program, values, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.program.outputs(self.values, self.mask, x)


def loss_of(task: Task) -> Criterion:
    """Return the loss that a task trains with."""
    if type(task) in (Classification, Prediction):
        assert isinstance(task, Classification)
        if task.criterion in (cross_entropy, F.cross_entropy):
            return Criterion(smoothing=task.smoothing)
        if task.criterion is F.mse_loss:
            return Criterion(squares=True)
        raise UnknownPartError(f"the loss {getattr(task.criterion, '__name__', task.criterion)}")
    raise UnknownPartError(f"the task {type(task).__name__}")


def places_of(layout: Layout, mask: Mask) -> Places:
    """Return where a model's tensors are among the values on a mask."""
    sizes = [*mask.counts, *(entry.size for entry in layout.dense + layout.buffers)]
    begin = dict(zip(layout.entries, starts(sizes), strict=False))
    layers = mask.bits.split(list(mask.sizes))
    partly = [not bool(bits.all()) for bits in layers]
    return Places(
        starts={name: begin[entry] for entry in layout.entries for name in entry.names},
        bits={name: bits.numpy() for entry, bits, some in zip(layout.layers, layers, partly, strict=True) if some for name in entry.names},
        grouped=frozenset(name for entry in layout.layers if entry.block is not None for name in entry.names),
        shapes={name: entry.shape for entry in layout.entries for name in entry.names},
        parameters=sum(mask.counts) + sum(entry.size for entry in layout.dense),
        length=sum(sizes),
    )


def _check_names(stages: Sequence[Stage], layout: Layout) -> None:
    """Check that every parameter is used exactly once, and that only links are pruned."""
    entry_of = {name: entry for entry in layout.entries for name in entry.names}
    used: set[object] = set()
    pruned = {id(entry) for entry in layout.layers}
    for stage in stages:
        part = stage.part
        for kind in ("weight", "bias", "gamma", "beta", "mean", "variance"):
            name = getattr(part, kind, None) if isinstance(part, LinksPart | NormPart) else None
            if name is None:
                continue
            if name not in entry_of:
                raise UnknownPartError(f"'{name}', which is no part of the model's vector")
            if id(entry_of[name]) in used:
                raise UnknownPartError(f"'{name}', which the model uses twice")
            if kind != "weight" and id(entry_of[name]) in pruned:
                raise UnknownPartError(f"'{name}', which is pruned and holds no links")
            used.add(id(entry_of[name]))
    for entry in layout.parameter_entries:
        if id(entry) not in used:
            raise UnknownPartError(f"'{entry.name}', which the model does not use")
