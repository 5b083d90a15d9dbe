"""A study: several policies played on one bandit, side by side, with the theorem's bound."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fedrts.bandit import bound, environment, policies, regret
from fedrts.bandit.environment import Environment, Reward
from fedrts.errors import InputError, nearest
from fedrts.registry import import_path
from fedrts.sparse import random

REWARDS: dict[str, Reward] = {"total": environment.total, "any_success": environment.any_success}

ReportStep = Callable[[str, int], None]
"""Told (policy, steps played) now and then."""


@dataclass(frozen=True)
class Settings:
    """The settings that determine a study."""

    arms: int = 1000
    pick: int = 100
    steps: int = 10_000
    scales: tuple[float, ...] = (1.0, 10.0)
    """λ of each TSAdj."""
    repetitions: int = 20
    seed: int = 0
    gap: float = 0.4
    """Between the worst of the K best means and the best of the others."""
    means: tuple[float, ...] | None = None
    """μ in place of those that `gap` makes."""
    reward: str = "total"
    clients: int = 1
    """Bernoulli draws that an outcome is the mean of."""
    lipschitz: float = 1.0
    universal: float = 1.0
    epsilon: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("arms", 2), ("steps", 10), ("repetitions", 2), ("clients", 1), ("seed", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise InputError(f"--{name} must be at least {least} and less than 2⁶³ (got {getattr(self, name)})")
        if not 1 <= self.pick < self.arms:
            raise InputError(f"--pick must be at least 1 and less than the {self.arms} arms (got {self.pick})")
        if not 0 <= self.gap < 1:
            raise InputError(f"--gap must be at least 0 and less than 1 (got {self.gap:g})")
        positive = {
            "--lipschitz": self.lipschitz,
            "--universal": self.universal,
            "--epsilon": 1.0 if self.epsilon is None else self.epsilon,
        }
        for name, value in [*positive.items(), *(("--scale", scale) for scale in self.scales)]:
            if not 0 < value < float("inf"):
                raise InputError(f"{name} must be a number above 0 (got {value:g})")
        if len(set(self.scales)) < len(self.scales):
            raise InputError("--scale names the same λ twice")

    def mu(self) -> np.ndarray:
        """The means, `[N]`."""
        return environment.banded_means(self.arms, self.pick, self.gap) if self.means is None else np.array(self.means)


@dataclass(frozen=True)
class Curve:
    """The regret of one policy: mean and standard error over repetitions after the steps of the study."""

    mean: np.ndarray
    error: np.ndarray
    fits: dict[str, regret.Fit]
    doubling: float
    """How much more regret the last doubling of time brought than the one before: log t 1, √t 1.41, t 2."""

    grown: float
    """The share of the last regret that came in the steps that the laws are fitted to."""

    @property
    def law(self) -> str:
        """The law that fits best; none if the regret has stopped growing."""
        return max(self.fits, key=lambda name: self.fits[name].r2) if self.grown > 1e-3 else "stopped"


@dataclass(frozen=True)
class Study:
    settings: Settings
    at: np.ndarray
    curves: dict[str, Curve]
    bound: bound.Bound
    slope: float | None
    """The least possible multiple of log T, where it is known (linear reward, Bernoulli outcomes)."""
    seconds: float
    fit_from: int
    """First step that the laws are fitted to."""

    def summary(self) -> dict[str, Any]:
        """Everything except the curves, for JSON (infinities as null)."""
        steps = self.settings.steps
        theorem = {
            "log_term": self.bound.logarithmic,
            "constant": self.bound.constant,
            "epsilon": self.bound.epsilon,
            "value": self.bound.after(steps),
            "trivial": self.bound.trivial(steps),
            "vacuous": self.bound.vacuous(steps),
            "speaks_from_power_of_ten": self.bound.speaks_from(),
        }
        found = {
            name: {
                "regret": float(curve.mean[-1]),
                "standard_error": float(curve.error[-1]),
                "law": curve.law,
                "doubling": None if math.isnan(curve.doubling) else curve.doubling,
                "fits": {law: asdict(fit) for law, fit in curve.fits.items()},
            }
            for name, curve in self.curves.items()
        }
        return {
            "settings": asdict(self.settings),
            "policies": found,
            "fit_from": self.fit_from,
            "bound": {key: value if np.isfinite(value) else None for key, value in theorem.items()},
            "least_slope": self.slope,
            "seconds": self.seconds,
        }


def reward_of(name: str) -> Reward:
    """Find a reward by name or by import path `pkg.module:name`; your own is tried on a few arms first."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise InputError(f"there is no reward '{name}'{nearest(name, REWARDS)}; or give an import path pkg.module:name")
    own: Reward = import_path(name, "reward")  # type: ignore[assignment]
    for shape in ((2, 3), (2, 4, 3)):
        actions = torch.arange(math.prod(shape)).reshape(shape) % 2 == 0
        means = torch.linspace(0.2, 0.8, math.prod(shape), dtype=torch.float64).reshape(shape)
        try:
            given = own(actions, means)
        except Exception as error:
            raise InputError(f"the reward '{name}' fails on actions and means {list(shape)}: {' '.join(str(error).split())}") from error
        if not isinstance(given, torch.Tensor) or given.shape != shape[:-1]:
            raise InputError(
                f"the reward '{name}' must map actions and means [..., N] to a tensor [...]; on {list(shape)} it gave {given!r}"
            )
        if not given.isfinite().all():
            raise InputError(f"the reward '{name}' must be finite; on actions and means {list(shape)} it gave {given!r}")
    return lambda actions, means: own(actions, means).double()


def study(settings: Settings, report: ReportStep = lambda _name, _step: None) -> Study:
    """Play every policy on all of the machine's cores. A pure function of the settings."""
    started = time.perf_counter()
    reward, mu = reward_of(settings.reward), settings.mu()
    world = Environment.shuffled(
        mu, settings.pick, settings.repetitions, _stream(settings.seed, "means"), reward=reward, clients=settings.clients
    )
    count = settings.arms * settings.repetitions
    players: dict[str, policies.Policy] = {name_of(scale): policies.TSAdj(count, scale) for scale in settings.scales}
    players |= {"CUCB": policies.CUCB(count), "greedy": policies.Greedy(count), "random": policies.RandomPolicy(count)}
    at, fit_from = regret.checkpoints(settings.steps), max(1, settings.steps // 10)
    stopped = threading.Event()

    def play(name: str) -> Curve:
        def played(step: int) -> None:
            if stopped.is_set():
                raise RuntimeError("another policy failed, or the user asked to stop")
            report(name, step)

        found = regret.play(players[name], world, settings.steps, at, _stream(settings.seed, name), played)
        mean = found.mean(0)
        grown = 1 - float(mean[at <= fit_from][-1] / mean[-1]) if mean[-1] > 0 else 0.0
        return Curve(mean, found.std(0, ddof=1) / np.sqrt(len(found)), regret.fits(at, mean, fit_from), regret.doubling(at, mean), grown)

    torch_threads = torch.get_num_threads()
    with ThreadPoolExecutor(os.cpu_count() or 1, initializer=torch.set_num_threads, initargs=(1,)) as threads:  # a thread a policy
        try:
            curves = dict(zip(players, threads.map(play, players), strict=True))
        except BaseException:
            stopped.set()  # leaving the block waits for the others
            raise
        finally:
            torch.set_num_threads(torch_threads)
    theorem = bound.bound(bound.gaps(mu, settings.pick, reward), settings.steps, settings.lipschitz, settings.universal, settings.epsilon)
    known = reward is environment.total and settings.clients == 1
    slope = bound.asymptotic_slope(mu, settings.pick) if known else None
    return Study(settings, at, curves, theorem, slope, time.perf_counter() - started, fit_from)


def names(settings: Settings) -> list[str]:
    """Return the policies of a study, in order."""
    return [*map(name_of, settings.scales), "CUCB", "greedy", "random"]


def name_of(scale: float) -> str:
    """Return the name of a TSAdj policy; different λ have different names."""
    brief = f"{scale:g}"
    return f"TSAdj λ={brief if float(brief) == scale else scale}"


def _stream(seed: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(random.key(seed, "regret", purpose)))
