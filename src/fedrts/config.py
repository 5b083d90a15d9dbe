"""The experiment: one typed tree that files, flags and keywords all build.

Defaults are the paper's setting; a data set's recipe overrides them; then come the experiment file and, last, flags or keywords.
"""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedrts import data, methods, models
from fedrts.data.contract import Recipe
from fedrts.data.partition import Partition
from fedrts.engines.choice import KernelName
from fedrts.engines.choice import Name as EngineName
from fedrts.engines.kernels import Precision
from fedrts.errors import InputError, nearest, note
from fedrts.guard import Reducer
from fedrts.methods.base import Method
from fedrts.server_optimizer import DEFAULT_RATE, Kind
from fedrts.wire.quantise import ValueType

CUSTOM = "custom"
"""The model or data set of a run whose objects were given in Python."""

Settings = Mapping[str, Any]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Clients(Table):
    """The federation: who takes part and how the data is divided."""

    total: int = Field(100, ge=1, description="clients in the federation")
    per_round: int = Field(10, ge=1, description="clients that take part in each round")
    partition: Partition = Field(
        "dirichlet", description="dirichlet (skewed labels), quantity (skewed sizes), iid, shards (few labels), sites (own data)"
    )
    alpha: Number = Field(0.5, gt=0, description="Dirichlet concentration: lower is more heterogeneous")
    classes_per_client: int = Field(2, ge=1, description="labels that a client holds, of shards")
    dropout: Number = Field(0.0, ge=0, lt=1, description="simulated: chance that a client vanishes after its download")
    min_size: int | None = Field(None, ge=1, description="least number of samples of a client; default 10, of quantity 16 or a batch")

    @model_validator(mode="after")
    def _enough(self) -> Clients:
        if self.per_round > self.total:
            raise ValueError(f"clients.per_round = {self.per_round} must not exceed clients.total = {self.total}")
        return self


class Train(Table):
    """What a client does with its data in a round."""

    epochs: int = Field(5, ge=1, description="passes over the local data in a round")
    batch_size: int = Field(64, ge=1, description="samples per step")
    lr: Number = Field(0.01, gt=0, description="learning rate, of the first round")
    schedule: Literal["constant", "cosine", "step", "exponential"] = Field("constant", description="how the rate falls over the rounds")
    lr_end: Number = Field(0.01, gt=0, le=1, description="share of lr that is left in the last round, under a schedule that falls")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="local optimiser, new for every client and round")
    momentum: Number = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: Number = Field(0.0, ge=0, description="L2 penalty of the optimiser")
    proximal: Number = Field(0.0, ge=0, description="μ: pull towards the received model, μ/2·‖W − W_received‖² (FedProx)")
    server_optimizer: Kind = Field("sgd", description="of the server: sgd (averaging), momentum (FedAvgM) or adam (FedAdam)")
    server_lr: Number | None = Field(None, gt=0, description="of the server; default 1, for adam 0.01")
    server_momentum: Number = Field(0.9, ge=0, lt=1, description="β of momentum, β_1 of adam")
    server_beta2: Number = Field(0.99, ge=0, lt=1, description="β_2 of adam")
    server_tau: Number = Field(1e-3, gt=0, description="τ of adam: how far its steps adapt")


class Topology(Table):
    """When and how far the topology may change, and how the density is spread over layers."""

    interval: int = Field(10, ge=1, description="ΔT: rounds between two outer rounds")
    end: int | None = Field(None, ge=1, description="T_end: from this round on the topology is fixed; default 0.6 · rounds")
    adjust: Number = Field(0.4, ge=0, le=1, description="α_adj: share of a layer's active links up for exchange at round 0")
    first_outer: int = Field(0, ge=0, description="first outer round: 0 or the interval")
    budget: Literal["all", "prunable"] = Field("all", description="does the density count over all parameters or the prunable ones?")
    layer_density: Literal["erk", "er", "uniform"] = Field("erk", description="how the density is spread over layers")
    init_mask: Literal["random", "magnitude"] = Field("random", description="the first topology")
    prunable: str | None = Field(None, description="import path of one's own rule (name, parameter) → bool")

    @model_validator(mode="after")
    def _first(self) -> Topology:
        if self.first_outer not in (0, self.interval):
            raise ValueError(f"topology.first_outer must be 0 or topology.interval = {self.interval} (got {self.first_outer})")
        return self


class Eval(Table):
    """When the server's model is tested."""

    every: int = Field(5, ge=1, description="rounds between two evaluations; the last ten rounds always are")
    batch_size: int = Field(512, ge=1, description="samples per forward pass; does not change results beyond rounding")
    fairness: bool = Field(True, description="at the end, judge the model by class and by client (fairness.json)")


class Engine(Table):
    """Who runs the clients; `engine = "serial"` is short for `engine.name`."""

    name: EngineName = Field(
        "auto",
        description="serial: one client after the other; batched: side by side; flower: on nodes; ray: among actors; auto: what is faster",
    )
    kernel: KernelName = Field("auto", description="side by side as one vectorised program, or streamed: one program a client")
    slots: int = Field(0, ge=0, description="clients that train side by side; 0: all of a round, if there is memory")
    workers: int = Field(0, ge=0, description="threads that share the slots on a CPU; 0: one")
    precision: Precision = Field("float32", description="float32, tf32 or bf16 (both on GPUs; weights stay float32)")
    actors: int = Field(0, ge=0, description="ray: among so many the clients of a round are divided; 0: one a GPU of this machine, or two")
    cpus: Number = Field(0.0, ge=0, description="ray: CPUs of an actor, fractions too; 0: an equal share of this machine's")
    gpus: Number = Field(0.0, ge=0, description="ray: GPUs of an actor, fractions too; 0: one where clients train on GPUs")
    address: str = Field("local", description="ray: local starts one on loopback; auto or HOST:PORT joins a cluster")
    nodes: int = Field(2, ge=1, description="flower: nodes on this machine, among which `fedrts run` divides the clients")
    timeout: Number = Field(3600.0, gt=0, description="flower: seconds that nodes have for an order")
    wait: Number = Field(600.0, ge=0, description="flower: seconds to wait for nodes before going on without them")


class Wire(Table):
    """How values travel."""

    value_type: ValueType = Field("float32", description="float32 (lossless), float16 or int8 (unbiased rounding), both ways")


class GuardTable(Table):
    """Under which rules clients' replies count."""

    quorum: Number = Field(0.3, gt=0, le=1, description="share of a round's clients whose replies must be usable")
    over_select: Number = Field(0.0, ge=0, le=10, description="how many more clients than needed are asked, as a share")
    deadline: Number = Field(0.0, ge=0, description="seconds after which replies of a round are late; 0: never")
    attempts: int = Field(5, ge=1, description="times that a round is tried with other clients before the run stops")
    norm_bound: Number = Field(100.0, gt=0, description="largest update, as a multiple of max(norm of the model, 1)")
    reducer: Reducer = Field("mean", description="of the weights: mean, clip (at norm_bound), trimmed_mean, median")
    trim: Number = Field(0.2, ge=0, lt=0.5, description="share cut off at each end by trimmed_mean")
    statistic_bound: Number = Field(1e9, gt=0, description="largest BatchNorm statistic; inputs that are not normalised may need more")
    max_share: Number = Field(1.0, gt=0, le=1, description="largest share of one client in votes and indicators")
    strikes: int = Field(3, ge=1, description="rejected replies after which a client is asked no more")


class Privacy(Table):
    """What clients do to their uploads before these leave, see docs/security.md; all off by default."""

    clip: Number = Field(0.0, ge=0, description="largest norm of a client's update, scaled down where it is larger; 0: off")
    noise: Number = Field(0.0, ge=0, description="standard deviation of Gaussian noise on every value, in units of clip; 0: off")
    index_epsilon: Number = Field(0.0, ge=0, description="ε of randomised response on the index sets of a message; 0: off")
    delta: Number = Field(1e-5, gt=0, lt=1, description="δ for which the ε of the noise is stated")

    @model_validator(mode="after")
    def _bounded(self) -> Privacy:
        if self.noise and not self.clip:
            raise ValueError("privacy.noise needs privacy.clip: noise hides only what is bounded")
        return self


class Checkpoint(Table):
    """How often the state is made durable."""

    every: int | str = Field("auto", description="rounds, '30s' for seconds, or 'auto': every round, at most 5 % of the time")

    @field_validator("every", mode="before")
    @classmethod
    def _known(cls, every: object) -> object:
        rounds = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not rounds and not (isinstance(every, str) and re.fullmatch(r"auto|\d+s", every)):
            raise ValueError(f"checkpoint.every must be a number of rounds ≥ 1, seconds such as '30s', or 'auto' (got {every!r})")
        return every


class Experiment(Table):
    """Everything that determines a run."""

    method: str = Field(methods.DEFAULT, description="a name from `fedrts methods`")
    model: str = Field("auto", description="a name from `fedrts models`, an import path, or auto: what suits the data")
    data: str = Field(data.DEFAULT, description="a name from `fedrts data`, or an import path")
    density: Number = Field(0.2, gt=0, le=1, description="share of the parameters that stay active (d')")
    rounds: int = Field(500, ge=1, description="rounds of training (T_max)")
    seed: int = Field(0, ge=0, lt=2**63, description="of everything random")
    init: str | None = Field(None, description="safetensors file of weights to start from; default: random ones")
    out: str | None = Field(None, description="run folder; default runs/<time>-<data>-<method>-<seed>")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    method_options: dict[str, Any] = Field(default_factory=dict, description="the method's own, see `fedrts methods`")
    model_options: dict[str, Any] = Field(default_factory=dict, description="the model's own, and prune_output")
    data_options: dict[str, Any] = Field(default_factory=dict, description="the data set's own")
    engine: Engine = Engine()
    clients: Clients = Clients()
    train: Train = Train()
    topology: Topology = Topology()
    eval: Eval = Eval()
    wire: Wire = Wire()
    guard: GuardTable = GuardTable()
    privacy: Privacy = Privacy()
    checkpoint: Checkpoint = Checkpoint()

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N (got {device!r})")
        return device

    @model_validator(mode="after")
    def _ends_in_time(self) -> Experiment:
        if self.topology.end is not None and self.topology.end > self.rounds:
            raise ValueError(f"topology.end = {self.topology.end} must not exceed rounds = {self.rounds}")
        return self

    @property
    def min_size(self) -> int:
        """Samples that every client has at least."""
        if self.clients.min_size is not None:
            return self.clients.min_size
        return min(16, self.train.batch_size) if self.clients.partition == "quantity" else 10

    @property
    def end(self) -> int:
        """T_end."""
        return self.topology.end if self.topology.end is not None else max(1, math.floor(0.6 * self.rounds))


SHORT = {
    "clients": ("clients", "total"),
    "per_round": ("clients", "per_round"),
    "epochs": ("train", "epochs"),
    "batch_size": ("train", "batch_size"),
    "lr": ("train", "lr"),
    "engine": ("engine", "name"),
    "precision": ("engine", "precision"),
    "value_type": ("wire", "value_type"),
}
"""Flags and keywords that stand for a key inside a table."""


def from_keywords(keywords: Settings) -> dict[str, Any]:
    """Settings of flat keywords (`lr=0.1`, `clients=20`) and whole tables (`train={"lr": 0.1}`); None means not given."""
    settings: dict[str, Any] = {}
    for name, value in keywords.items():
        if value is None:
            continue
        value = str(value) if isinstance(value, Path) else value
        if name in SHORT and not isinstance(value, Mapping):
            table, entry = SHORT[name]
            settings = merged(settings, {table: {entry: value}})
        else:
            settings = merged(settings, {name: value})
    return settings


def from_method(method: Method | str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that name a method, and those that make this very object again."""
    if not isinstance(method, Method):
        return {"method": method}, {}
    kind = type(method)
    name = next((name for name in methods.names() if methods.get(name) is kind), f"{kind.__module__}:{kind.__qualname__}")
    own = method.model_dump()
    return {"method": name}, {"density": own.pop("density"), "method_options": own}


def from_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Settings of `table.key=value` texts; values as in TOML, bare words as strings."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise InputError(f"--set takes table.key=value, not '{assignment}'")
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        for part in reversed(path.strip().split(".")):
            value = {part: value}
        settings = merged(settings, value)
    return settings


def from_file(path: str | Path) -> dict[str, Any]:
    """Settings of an experiment file."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the experiment file '{path}': {getattr(error, 'strerror', None) or error}") from error
    settings = parsed_toml(text, path)
    settings.pop("versions", None)  # a resolved file says what made it
    return settings


def parsed_toml(text: str, origin: str | Path) -> dict[str, Any]:
    """The tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"'{origin}' is no valid TOML: {error}") from error


def resolve(*layers: Settings) -> Experiment:
    """The complete experiment: later layers override earlier ones, recipes fill in, `auto` is decided, every name is checked."""
    given: dict[str, Any] = {}
    for layer in layers:
        given = merged(given, _expanded(layer))
    name = given.get("data", data.DEFAULT)
    recipe = data.recipe(name) if isinstance(name, str) and name != CUSTOM else Recipe()
    settings = merged(recipe.settings, given)
    _fit_per_round(settings, given)
    experiment = validated(Experiment, settings)
    if method_class(experiment.method).dense and given.get("density", 1.0) != 1.0:
        note(f"{experiment.method} is a dense method: density {given['density']} is ignored")
    if experiment.model == "auto":
        experiment = experiment.model_copy(update={"model": recipe.model})
    return complete(experiment)


def with_newer_keys(old: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings that an earlier version wrote, with the defaults of those keys of `now` that it did not know yet."""
    missing = now.keys() - old.keys()
    if not missing:
        return dict(old)
    try:
        full = flat(complete(validated(Experiment, nested(old))).model_dump(mode="json"))
    except InputError:  # they have keys that are known no more
        return dict(old)
    return {key: full[key] for key in missing if full.get(key) is not None} | dict(old)


def complete(experiment: Experiment) -> Experiment:
    """`experiment` with `auto` decided and names and options checked; a pure function of it and of this machine's devices."""
    method = make_method(experiment)
    if experiment.model != CUSTOM:
        check_options("model_options", experiment.model_options, models.get(experiment.model), ("input_shape", "classes"), {"prune_output"})
    if experiment.data != CUSTOM:
        check_options("data_options", experiment.data_options, data.get(experiment.data), ("folder",), {"validation"})
    options = {key: value for key, value in method.model_dump().items() if key != "density"}
    train = experiment.train
    rate = DEFAULT_RATE[train.server_optimizer] if train.server_lr is None else train.server_lr
    return experiment.model_copy(
        update={
            "data": data.absolute(experiment.data),
            "method_options": {key: value for key, value in options.items() if value is not None},
            "density": 1.0 if method.dense else experiment.density,
            "device": _device(experiment.device),
            "init": None if experiment.init is None else str(Path(experiment.init).absolute()),  # resuming may happen elsewhere
            "topology": experiment.topology.model_copy(update={"end": experiment.end}),
            "clients": experiment.clients.model_copy(update={"min_size": experiment.min_size}),
            "train": experiment.train.model_copy(update={"server_lr": rate}),
        }
    )


def method_class(name: str) -> type[Method]:
    """The class of a method's name or import path."""
    kind = methods.get(name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise InputError(f"'{name}' is no method: it must be a subclass of fedrts.methods.base.Method")
    return kind


def make_method(experiment: Experiment) -> Method:
    """The method object of an experiment."""
    kind = method_class(experiment.method)
    if "density" in experiment.method_options:
        raise InputError("method_options.density is not a key: density stands at the top level")
    return validated(kind, {**experiment.method_options, "density": experiment.density}, prefix="method_options.")


def check_options(table: str, options: Settings, function: Any, own: Iterable[str], extra: set[str]) -> None:
    """Are `options` keyword arguments of `function` (less `own`, which we pass) or among `extra`?"""
    parameters = inspect.signature(function).parameters
    known = (set(parameters) - set(own)) | extra
    for key in options:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise InputError(f"unknown key '{table}.{key}'{nearest(key, known)}")
    if not isinstance(options.get("prune_output", False), bool):
        raise InputError(f"{table}.prune_output must be true or false (got {options['prune_output']!r})")


Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], settings: Settings, prefix: str = "") -> Model:
    """`kind` of `settings`; the first mistake is an InputError that names the key and what is allowed."""
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise InputError(_explained(error, kind, prefix)) from error


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Tables again, of keys with dots; the inverse of `flat`."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        table = result
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return result


def flat(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """`{"train.lr": 0.1, …}` of nested tables."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return result


def merged(base: Settings, over: Settings) -> dict[str, Any]:
    """`base` with the entries of `over`, tables merged key by key; tuples become lists, as in TOML."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            table = result.get(key)
            result[key] = merged(table if isinstance(table, Mapping) else {}, value)
        else:
            result[key] = list(value) if isinstance(value, tuple) else value
    return result


def _expanded(layer: Settings) -> dict[str, Any]:
    """A layer with `engine = "serial"` written as a table, so that it merges with one."""
    return {**layer, "engine": {"name": layer["engine"]}} if isinstance(layer.get("engine"), str) else dict(layer)


def _fit_per_round(settings: dict[str, Any], given: Settings) -> None:
    """A default number of clients per round shrinks to the number of clients that the user asked for."""
    clients = settings.get("clients")
    asked = given.get("clients")
    if isinstance(clients, dict) and isinstance(clients.get("total"), int) and isinstance(asked, Mapping) and "per_round" not in asked:
        default = clients.get("per_round", Clients.model_fields["per_round"].default)
        clients["per_round"] = max(1, min(default, clients["total"]))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise InputError(f"device '{name}' is not there: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return name


def _explained(error: ValidationError, kind: type[BaseModel], prefix: str) -> str:
    """One line for the first mistake of a validation."""
    errors = error.errors()
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])  # a typo hides what it meant
    path = [str(part) for part in first["loc"]]
    if first["type"] == "missing":
        return f"the key '{prefix}{'.'.join(path)}' is missing"
    if first["type"] == "extra_forbidden":
        return (
            f"unknown key '{prefix}{'.'.join(path)}'{nearest(path[-1], table.model_fields if (table := _table(kind, path[:-1])) else ())}"
        )
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    path = path[: _depth(kind, path)]  # where several types are allowed, pydantic names the one that it tried
    tried = [entry["msg"] for entry in error.errors() if [str(part) for part in entry["loc"]][: len(path)] == path]
    message = "a table of keys" if first["type"] in ("model_type", "dict_type") else " or ".join(map(_in_signs, tried))
    return f"{prefix}{'.'.join(path)} must be {_allowed(kind, path) or message} (got {first['input']!r})"


def _in_signs(message: str) -> str:
    """What pydantic says an input should be, with signs for relations."""
    message = message.removeprefix("Input should be ")
    for words, sign in (("greater than or equal to", "≥"), ("greater than", ">"), ("less than or equal to", "≤"), ("less than", "<")):
        message = message.replace(words, sign)
    return message


def _depth(kind: type[BaseModel], path: list[str]) -> int:
    """How many parts of a path lead to a key."""
    return next((depth for depth in range(1, len(path)) if _table(kind, path[:depth]) is None), len(path))


def _allowed(kind: type[BaseModel], path: list[str]) -> str:
    """The range of a numeric key, such as `> 0 and ≤ 1`."""
    owner = _table(kind, path[:-1])
    if owner is None or path[-1] not in owner.model_fields:
        return ""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in owner.model_fields[path[-1]].metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    return f"a number {' and '.join(bounds)}" if bounds else ""


def _table(kind: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The table at `path` inside `kind`."""
    for part in path:
        inner = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        kind = inner
    return kind
