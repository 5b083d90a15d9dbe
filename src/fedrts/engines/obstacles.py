"""Why a model's clients cannot train side by side."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedrts import trees
from fedrts.client.workbench import Workbench
from fedrts.engines.kernels import Kernel, Objective, counters
from fedrts.errors import reason
from fedrts.sparse.dispatch import Watching
from fedrts.sparse.layout import Layout
from fedrts.sparse.mode import training
from fedrts.trees import Tensors

_BY_NUMBERS = (".item()", "data-dependent control flow", "dynamic shape", "data pointer of Tensor that doesn't have storage")
"""How vmap says that a model asks for the numbers in a tensor."""
_NOT_VECTORISED = {"_scaled_dot_product_flash_attention_for_cpu"}


def obstacle(bench: Workbench, objective: Objective, kernel: Kernel) -> str | None:
    """Return why clients cannot run side by side; None if they can."""
    if bench.data.apart is not None:
        return bench.data.apart
    if (names := shared(bench.module)) is not None:
        return f"the model has one part under two names ({' and '.join(names)})"
    if has_counters(bench.module, bench.layout):
        return "the model counts in buffers that are no floating-point numbers"
    if any(isinstance(part, torch.jit.ScriptModule) for part in bench.module.modules()):
        return "the model has parts of TorchScript"
    try:
        if (kept := remembered(bench)) is not None:
            return kept
        if (name := watched(bench, objective).draws) is not None:
            return f"the model draws random numbers while it trains, as dropout does ({name})"
        with training(bench.module):
            kernel(*(trees.mapped(lambda leaf: leaf.expand(2, *leaf.shape).clone(), part) for part in sample(bench)))
    except Exception as error:  # whatever PyTorch makes of a model of one's own
        return _cause(error)
    return None


def _cause(error: Exception) -> str:
    """Say in a few words what PyTorch says in many."""
    said = reason(error)
    if any(words in said for words in _BY_NUMBERS):
        return "what the model does depends on numbers that it takes out of a tensor, as .item() does"
    return said.partition(". ")[0][:200]


def vectorises(bench: Workbench, objective: Objective) -> bool:
    """Whether every operation of the model has a vectorised form; others run slowly, client by client."""
    if bench.data.apart is not None or shared(bench.module) is not None:  # an obstacle, which is found elsewhere
        return True
    try:
        return not watched(bench, objective).names & _NOT_VECTORISED
    except Exception:  # an obstacle, too
        return True


def shared(module: nn.Module) -> tuple[str, str] | None:
    """Return two names of a shared part with tensors: PyTorch's functional call does not restore such a part's own tensors."""
    first: dict[nn.Module, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if first.setdefault(part, name) != name and next(iter(part.state_dict()), None) is not None:
            return first[part], name
    return None


def sample(bench: Workbench) -> tuple[Tensor, Tensors, Tensors]:
    """Return the model's weights `[n]` and a small batch."""
    rows = torch.arange(min(2, bench.training.batch_size, bench.data.samples), device=bench.device)
    return bench.layout.flatten(bench.module.state_dict()), *bench.data.training_batch(rows, 0)


class Watch(Watching):
    """Records the operations that it sees, and the first that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.draws: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.add(name)
        if self.draws is None and draws(func, args, kwargs or {}):
            self.draws = name
        return func(*args, **(kwargs or {}))


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operation draws random numbers; those that can drop (attention) do so at a rate above 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    rates = [given.get(name, 0.0) for name in ("dropout_p", "dropout") if name in names]
    return not rates or any(rates)


def watched(bench: Workbench, objective: Objective) -> Watch:
    """Record the operations of a forward pass."""
    weights, x, y = sample(bench)
    parameters = bench.layout.parameters
    watch = Watch()
    with torch.random.fork_rng([weights.device] if weights.device.type == "cuda" else []), training(bench.module), watch:
        objective.loss(weights[:parameters].clone(), weights[parameters:].clone(), x, y)
    return watch


def remembered(bench: Workbench) -> str | None:
    """Return state that a pass leaves in the model outside its statistics, which clients side by side would share; None if none."""
    try:
        module = copy.deepcopy(bench.module)
    except Exception:  # a model of one's own that cannot be copied is not looked at
        return None
    buffers, plain = dict(module.named_buffers()), _plain(module)
    before = {name: value.clone() for name, value in buffers.items() if not value.is_floating_point()}
    _, x, y = sample(bench)
    device = bench.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad(), training(module):
        bench.data.task.loss(module, x, y)
    for name, buffer in module.named_buffers():
        if buffer is not buffers.get(name):
            return f"the model puts another tensor in the place of its buffer '{name}', which is then lost: change it in place"
        if name in before and name not in counters(module) and not torch.equal(buffer, before[name]):
            return f"the model changes its buffer '{name}' while it trains, which is no floating-point number"
    changed = next((name for name, value in _plain(module).items() if name not in plain or value != plain[name]), None)
    return None if changed is None else f"the model changes its attribute '{changed}' while it trains"


def _plain(module: nn.Module) -> dict[str, object]:
    """Return numbers and words among the attributes of a module and its parts."""
    parts = ((f"{name}.{key}".lstrip("."), value) for name, part in module.named_modules() for key, value in vars(part).items())
    return {name: value for name, value in parts if isinstance(value, (bool, int, float, str))}


def has_counters(module: nn.Module, layout: Layout) -> bool:
    """Whether buffers outside the vector may affect training; they are the same in every step here."""
    integers = {name for name, value in layout.constants.items() if not value.is_floating_point() and value.dtype != torch.bool}
    return bool(integers - counters(module))
