"""All keys of an experiment, table by table, with their defaults and ranges."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedrts import data, methods
from fedrts.callbacks import callbacks as all_callbacks
from fedrts.client.privacy import Protection
from fedrts.client.training import LocalTraining
from fedrts.data.partition import SITES, Partition
from fedrts.engines.settings import EngineSettings
from fedrts.methods.first_mask import masks as first_masks
from fedrts.secure.settings import SecureSums
from fedrts.server.averaging import AverageName, LateAverage
from fedrts.server.guard import QUORUM, SITES_CLAIM, Guard
from fedrts.server.optimizer import ServerOptimizer, optimizers
from fedrts.sparse.arms import LINK, known_unit
from fedrts.sparse.falling import curves
from fedrts.sparse.schedule import Schedule
from fedrts.tables import Named, Number, Table
from fedrts.tasks.metrics import addable
from fedrts.tasks.metrics import metrics as all_metrics
from fedrts.wire.value_types import ValueType


def _words(given: object) -> object:
    """Split a comma-separated list of words."""
    return [word.strip() for word in given.split(",") if word.strip()] if isinstance(given, str) else given


class Clients(Table):
    """The federation: who takes part and how the data is divided."""

    total: int = Field(100, ge=1, description="clients in the federation")
    per_round: int = Field(10, ge=1, description="clients that take part in each round")
    partition: Partition = Field(
        "dirichlet", description="dirichlet (skewed labels), quantity (skewed sizes), iid, shards (few labels), sites (own data)"
    )
    alpha: Number = Field(0.5, gt=0, description="Dirichlet concentration: lower is more heterogeneous")
    classes_per_client: int = Field(2, ge=1, description="labels per client, for shards")
    dropout: Number = Field(0.0, ge=0, lt=1, description="simulated: probability that a client drops out after its download")
    min_size: int | None = Field(None, ge=1, description="smallest number of samples per client; default 10, for quantity 16 or one batch")
    share_model: bool = Field(False, description="flower: send every node the final model when the study ends")

    @model_validator(mode="after")
    def _enough(self) -> Clients:
        if self.per_round > self.total:
            raise ValueError(f"clients.per_round = {self.per_round} must not exceed clients.total = {self.total}")
        return self


class Training(LocalTraining):
    """Local training at the clients, and the server's optimiser."""

    server_optimizer: Annotated[str, Named(optimizers)] = Field(
        "sgd", description="server optimiser: sgd (averaging), momentum (FedAvgM) or adam (FedAdam)"
    )
    server_lr: Number | None = Field(None, gt=0, description="learning rate of the server optimiser; default 1, for adam 0.01")
    server_momentum: Number = Field(ServerOptimizer.momentum, ge=0, lt=1, description="β of momentum, β_1 of adam")
    server_beta2: Number = Field(ServerOptimizer.beta2, ge=0, lt=1, description="β_2 of adam")
    server_tau: Number = Field(ServerOptimizer.tau, gt=0, description="τ of adam: added to the denominator, larger adapts less")
    average: AverageName = Field(
        LateAverage.name,
        description="average of late models, kept in addition to the last model: tail (mean over the last rounds) or ema (exponential)",
    )
    average_share: Number = Field(LateAverage.share, gt=0, le=1, description="tail: share of the rounds to average, counted from the end")
    average_decay: Number = Field(LateAverage.decay, ge=0, lt=1, description="ema: decay per round")


class Topology(Table):
    """When and how far the topology may change, and how the density is spread over layers."""

    interval: int = Field(10, ge=1, description="ΔT: rounds between two outer rounds")
    end: int | None = Field(None, ge=1, description="T_end: round from which the topology is fixed; default: 0.6 · rounds")
    adjust: Number = Field(0.4, ge=0, le=1, description="α_adj: share of a layer's active links that may be exchanged at round 0")
    first_outer: int = Field(0, ge=0, description="first outer round: 0 or the interval")
    outer_at_end: bool = Field(False, description="make T_end itself an outer round if it is a multiple of the interval")
    budget: Literal["all", "prunable"] = Field("all", description="parameters that the density counts: all, or the prunable ones")
    layer_density: Literal["erk", "er", "uniform"] = Field("erk", description="how the density is spread over layers")
    density_start: Number | None = Field(
        None, gt=0, le=1, description="density of the first mask; it falls to `density` in outer rounds; default: constant density"
    )
    density_schedule: Annotated[str, Named(curves)] = Field(
        "cubic",
        description="how the density falls, from the first outer round to the last before T_end: cubic (fast at first), cosine or linear",
    )
    init_mask: Annotated[str, Named(first_masks)] = Field(
        "random",
        description="first mask: random, magnitude, snip (by sensitivity, in a set-up), or given (the non-zeros of the initial weights; "
        "the default if those are sparse)",
    )
    init_scale: Literal["dense", "sparse"] = Field(
        "dense",
        description="scale of the first weights: dense, or sparse (times √(links / active links) per layer, so that signals keep strength)",
    )
    unit: str = Field(
        LINK,
        description="pruned and grown together: link, kernel (k × k weights), or block:R×C (output × input channels), such as block:4×4",
    )
    prunable: str | None = Field(None, description="import path of your own rule for what may be pruned: (name, parameter) → bool")

    @field_validator("unit")
    @classmethod
    def _known_unit(cls, unit: str) -> str:
        return known_unit(unit)

    @model_validator(mode="after")
    def _first(self) -> Topology:
        if self.first_outer not in (0, self.interval):
            raise ValueError(f"topology.first_outer must be 0 or topology.interval = {self.interval} (got {self.first_outer})")
        return self


class Stop(Table):
    """When a run ends before its last round, and with which model; off without `patience`."""

    patience: int | None = Field(None, ge=1, description="stop after this many rounds without improvement; default: never")
    metric: str | None = Field(None, description="metric to watch, on the validation split if there is one; default: the leading metric")
    min_delta: Number = Field(0.0, ge=0, description="smallest change that counts as an improvement")
    restore: bool = Field(True, description="end the run with the model of its best round (best.safetensors) instead of the last one")
    start: int = Field(0, ge=0, description="never stop before this round; resuming a stopped run sets it to the next round")


class Eval(Table):
    """When the server's model is tested."""

    every: int = Field(5, ge=1, description="evaluate every this many rounds, and in each of the last ten")
    batch_size: int = Field(512, ge=1, description="samples per forward pass; changes results by rounding only")
    fairness: bool = Field(True, description="at the end, evaluate the model by class and by client (fairness.json)")
    metrics: list[Annotated[str, Named(all_metrics)]] = Field(
        default_factory=list,
        description=f"more metrics, a list or separated by commas: {', '.join(addable())}, or one's own by import path",
    )

    @field_validator("metrics", mode="before")
    @classmethod
    def _listed(cls, names: object) -> object:
        return _words(names)


class Wire(Table):
    """How values travel."""

    value_type: ValueType = Field(
        "float32", description="float32 (lossless), float16, or int8, int6, int4, int2 (unbiased rounding), both ways"
    )
    download_type: ValueType | None = Field(None, description="value type of downloads; default: wire.value_type")
    feedback: bool = Field(False, description="error feedback: a client adds what rounding lost to its next update (and rounds to nearest)")


class Checkpoint(Table):
    """How often the state is saved to disk."""

    every: int | str = Field(
        "auto", description="rounds between checkpoints, '30s' for seconds, or 'auto': every round, within 5 % of the run's time"
    )

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
    model: str = Field("auto", description="a name from `fedrts models`, hf:FOLDER (transformers), an import path, or auto (fits the data)")
    data: str = Field(
        data.DEFAULT,
        description="a name from `fedrts data`, folder:PATH, npz:PATH, csv:FILE, parquet:FILE, or an import path pkg.module:name",
    )
    density: Number = Field(0.2, gt=0, le=1, description="share of all parameters that stay active (d')")
    rounds: int = Field(500, ge=1, description="rounds of training (T_max)")
    recipe: Literal["tuned", "paper"] = Field(
        "tuned", description="defaults for what you do not set: tuned (measured for this data and model) or paper (the published setting)"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed for all randomness")
    init: str | None = Field(None, description="safetensors file of initial weights; default: random weights")
    origin: str | None = Field(None, description="run folder to start from: take its model, mask and posteriors")
    tags: list[str] = Field(default_factory=list, description="your own labels for the report, as a list or separated by commas")
    callbacks: list[Annotated[str, Named(all_callbacks)]] = Field(
        default_factory=list,
        description="callbacks that watch the run and may stop it: best, csv, mlflow, progress, tensorboard, wandb, or import paths",
    )
    out: str | None = Field(None, description="run folder; default: runs/<time>-<data>-<method>-<seed>")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    method_options: dict[str, Any] = Field(default_factory=dict, description="options of the method, see `fedrts methods`")
    model_options: dict[str, Any] = Field(default_factory=dict, description="options of the model, see `fedrts models`, and prune_output")
    data_options: dict[str, Any] = Field(default_factory=dict, description="options of the data set, see `fedrts data`")
    engine: EngineSettings = EngineSettings()
    clients: Clients = Clients()
    train: Training = Training()
    topology: Topology = Topology()
    eval: Eval = Eval()
    stop: Stop = Stop()
    wire: Wire = Wire()
    guard: Guard = Guard()
    privacy: Protection = Protection()
    secure: SecureSums = SecureSums()
    checkpoint: Checkpoint = Checkpoint()

    @field_validator("tags", "callbacks", mode="before")
    @classmethod
    def _listed(cls, words: object) -> object:
        return _words(words)

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

    @model_validator(mode="after")
    def _falls(self) -> Experiment:
        start = self.topology.density_start
        if start is not None and start < self.density:
            raise ValueError(f"topology.density_start = {start:g} must not be below density = {self.density:g}: densities only fall")
        return self

    @property
    def min_size(self) -> int:
        """Smallest number of samples of every client."""
        if self.clients.min_size is not None:
            return self.clients.min_size
        return min(16, self.train.batch_size) if self.clients.partition == "quantity" else 10

    @property
    def quorum(self) -> float:
        """Share of a round's clients whose replies must be usable; by default all for sites, and t with secure sums."""
        usual = 1.0 if self.clients.partition == SITES else QUORUM
        asked = usual if self.guard.quorum is None else self.guard.quorum
        least = self.secure.needed(self.clients.per_round) / self.clients.per_round if self.secure.aggregation else 0.0
        return max(asked, min(least, 1.0))

    @property
    def secured(self) -> SecureSums:
        """The table `[secure]` with its threshold."""
        return self.secure.but(threshold=self.secure.needed(self.clients.per_round)) if self.secure.aggregation else self.secure

    @property
    def max_claim(self) -> float | None:
        """Limit on one client's sample count, in medians of the round: sites state their own counts."""
        if self.guard.max_claim is not None:
            return self.guard.max_claim
        return SITES_CLAIM if self.clients.partition == SITES else None

    @property
    def end(self) -> int:
        """T_end."""
        return self.topology.end if self.topology.end is not None else usual_end(self.rounds)

    @property
    def first_density(self) -> float:
        """Density of the first mask."""
        return self.density if self.topology.density_start is None else self.topology.density_start

    @property
    def schedule(self) -> Schedule:
        """When the topology may change; the model also determines how its density falls."""
        t = self.topology
        return Schedule(t.interval, self.end, t.adjust, t.first_outer, t.outer_at_end)


def usual_end(rounds: int) -> int:
    """Return the default T_end of a run of this many rounds."""
    return max(1, math.floor(0.6 * rounds))
