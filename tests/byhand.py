"""The methods' equations written out link by link in plain Python and NumPy; nothing here calls the package's own arithmetic."""

import math
from dataclasses import replace

import numpy as np

from fedrts.client.job import Job
from fedrts.sparse import random
from fedrts.sparse.mask import Mask
from fedrts.wire.fields import Values
from helping import ask

UNEQUAL = {"partition": "dirichlet", "alpha": 0.5, "min_size": 4}
"""Clients of different sizes, so that p_k matter."""


def largest(values, k):
    """The keys of the k largest values; ties go to the lowest key."""
    return sorted(values, key=lambda i: (-values[i], i))[:k]


def spans(sizes):
    """The links of each layer."""
    start = 0
    for size in sizes:
        yield range(start, start + size)
        start += size


def fraction(t, end, adjust):
    return adjust / 2 * (1 + math.cos(math.pi * t / end)) if t < end else 0.0


def quota(t, end, adjust, counts, sizes):
    return [min(math.floor(fraction(t, end, adjust) * k), n - k) for k, n in zip(counts, sizes, strict=True)]


def counts(active, sizes):
    return [sum(i in active for i in layer) for layer in spans(sizes)]


def rigl(strength, promise, active, sizes, quotas):
    """(kept, new) sets of links: drop the weakest of each layer, then grow the most promising of all that are inactive then."""
    kept, new = set(), set()
    for layer, q in zip(spans(sizes), quotas, strict=True):
        mine = {i: strength[i] for i in layer if i in active}
        stay = set(largest(mine, len(mine) - q))
        kept |= stay
        new |= stay | set(largest({i: promise[i] for i in layer if i not in stay}, q))
    return kept, new


def uploads(gradient, active, sizes, quotas):
    """{link: gradient} of the inactive links of largest |g| in each layer."""
    named: dict[int, float] = {}
    for layer, q in zip(spans(sizes), quotas, strict=True):
        named |= {i: gradient[i] for i in largest({i: abs(gradient[i]) for i in layer if i not in active}, q)}
    return named


def mean(vectors, samples):
    """Σ p_k x_k in float64, p_k = n_k / Σ n_j, as a list."""
    total = sum(samples)
    return [sum(n * float(v[i]) for v, n in zip(vectors, samples, strict=True)) / total for i in range(len(vectors[0]))]


def mean_of_named(named, samples, length):
    """The same for {link: value}; who does not name a link counts as 0."""
    return [sum(n * float(part.get(i, 0.0)) for part, n in zip(named, samples, strict=True)) / sum(samples) for i in range(length)]


def asked_for_everything(run, state, index):
    """(clients, samples, trained weights `[n]`, gradients `[P]` or None, replies) of a round's clients, from the engine."""
    current = run.plan.round(index, state.mask)
    (exchange,) = run.plan.exchanges(current)
    clients = run.plan.sample(index)
    whole = {"everything": Values(on="all")}
    if current.outer:
        whole["gradient"] = Values(of="gradient", on="links")
    replies = ask(run, replace(exchange, up={**exchange.up, **whole}), state, index, clients)
    weights = [reply.message["everything"].tolist() for reply in replies]
    gradients = [reply.message["gradient"].tolist() for reply in replies] if current.outer else None
    return clients, [len(run.rows[client]) for client in clients], weights, gradients, replies


def batches(run, index, client, epochs):
    """The client's batches of these epochs as (x, y)."""
    job = Job(
        run.plan.engine.bench,
        {},
        Mask.full(run.layout.sizes),
        run.plan.engine.rows[client],
        random.key(run.experiment.seed, "client", index, client),
    )
    rows = [batch.rows for epoch in epochs for batch in job.batches(epoch)]
    return [(run.data.x[own], run.data.y[own]) for own in rows]


class Perceptron:
    """The `mlp` model with its gradient by hand, in float64: parameters as `{name: array}`."""

    def __init__(self, tensors):
        self.values = {name: np.array(tensor.tolist(), np.float64) for name, tensor in tensors.items()}
        self.layers = sorted({int(name.split(".")[0]) for name in self.values})

    def gradient(self, x, y):
        """Return the gradient of the mean cross-entropy."""
        x, y = x.numpy().astype(np.float64).reshape(len(x), -1), y.numpy()
        inputs, signal = [], x
        for place in self.layers:
            inputs.append(signal)
            signal = signal @ self.values[f"{place}.weight"].T + self.values[f"{place}.bias"]
            if place != self.layers[-1]:
                signal = np.maximum(signal, 0)
        odds = np.exp(signal - signal.max(1, keepdims=True))
        back = odds / odds.sum(1, keepdims=True)
        back[np.arange(len(y)), y] -= 1
        back /= len(y)
        found = {}
        for place, signal in zip(reversed(self.layers), reversed(inputs), strict=True):
            found[f"{place}.weight"], found[f"{place}.bias"] = back.T @ signal, back.sum(0)
            back = (back @ self.values[f"{place}.weight"]) * (signal > 0)
        return found

    def step(self, gradient, masks, rate):
        for name, g in gradient.items():
            self.values[name] -= rate * g * masks.get(name, 1.0)

    def flat(self, entries):
        return np.concatenate([self.values[entry.name].ravel() for entry in entries])
