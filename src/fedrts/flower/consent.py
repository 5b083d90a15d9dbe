"""Consent: the digest and the description of an experiment, and what a server may be told."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from typing import TYPE_CHECKING

from fedrts.errors import InputError
from fedrts.flower.messages import Facts

if TYPE_CHECKING:
    from fedrts.flower.site import Site

SHOWN = 16
"""Characters of a digest that are shown; as many as one would type."""


class DeclinedError(InputError):
    """The reason why a site refuses. `told` is what the server may know: nothing about the site's data or files."""

    def __init__(self, text: str, told: str | None = None) -> None:
        super().__init__(text)
        self.told = text if told is None else told


def told(error: BaseException, what: str) -> str:
    """Return the server's view of an error: only its kind, after the words `what`, unless the error was made for the server."""
    return error.told if isinstance(error, DeclinedError) else f"{what} ({type(error).__name__}); its own screen says why"


def digest(facts: Facts) -> str:
    """Return the digest of a request: experiment, input shape and number of classes, independent of the order of keys."""
    text, shape, classes = (facts.get(name) for name in ("experiment", "input_shape", "classes"))
    whole = isinstance(shape, list) and all(type(size) is int for size in shape) and type(classes) is int
    if not isinstance(text, str) or not whole:
        raise DeclinedError("the server's introduction is none that this version knows: it lacks the experiment, input_shape or classes")
    asked = json.dumps([parsed(text), shape, classes], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def parsed(text: object) -> dict[str, object]:
    """Parse the settings of an experiment as the server wrote it."""
    if not isinstance(text, str):
        raise DeclinedError("the server's experiment is no text: it is no fedrts server, or one of another version")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DeclinedError(f"the server's experiment is no valid TOML: {error}") from error


def described(site: Site, digest: str) -> str:
    """Describe for the owner what an experiment would do at a site, and what would leave it."""
    from fedrts.client.figures import FigureForm
    from fedrts.client.privacy import Account, countable
    from fedrts.costs.estimate import Estimate
    from fedrts.methods.describe import in_words
    from fedrts.secure import sizes
    from fedrts.server.assessment import assessment
    from fedrts.wire import codec
    from fedrts.wire.fields import Frame

    run, e, host = site.run, site.run.experiment, site.host
    told = site.introduction()
    samples = max(told["samples"])
    cost = Estimate(run, samples, exact=False, invited=site.per_round).cost()
    schedule, mask = run.plan.schedule, run.method.begin(run.setup).mask
    kinds = {"set-up": [-1], "inner": [], "outer": []}
    for index in range(run.plan.rounds):
        kinds["outer" if schedule.is_outer(index) else "inner"].append(index)
    falling = "" if e.first_density == e.density else f" falling from {e.first_density:g}"
    lines = [
        f"experiment {digest[:SHOWN]}",
        f"  method {e.method}, model {e.model} with {cost.parameters:,} parameters, density {e.density:g}{falling}; {e.rounds} rounds",
        f"  trains {e.train.epochs} epochs a round in batches of {e.train.batch_size} on {e.data}, inputs {list(cost.input_shape)}",
        "told once, to take part",
        *(f"  {name}: {value}" for name, value in told.items()),
        "leaves in every round that this site is asked in",
    ]
    total, spent = 0.0, Account()
    if e.secure.aggregation and told.get("channels"):
        total += sizes.upload(FigureForm.of_channels(told["channels"], site.federation).ring)
    for kind, rounds in kinds.items():
        exchanges = run.plan.exchanges(run.plan.round(rounds[0], mask)) if rounds else []
        if not exchanges:
            continue
        size = cost.row("measured", kind).upload_bytes
        fields = "; then ".join(", ".join(map(in_words, exchange.up.values())) for exchange in exchanges)
        lines.append(f"  {kind} ({len(rounds)}): {fields}; about {size:,.0f} bytes a client")
        total += size * len(rounds) * len(told["samples"])
        for exchange in exchanges:
            values, indices = countable(exchange.up)
            spent += Account.of(run.bench.protection, values * len(rounds), indices * len(rounds))
    if site.held_out:
        judged = sum(map(run.plan.is_evaluated, range(run.plan.rounds)))
        size = codec.most(assessment(run.plan.metric_names).up, Frame(run.layout, mask))
        if e.secure.aggregation:
            size = sizes.upload(FigureForm.of_metrics(run.plan.metrics, e.secure, site.federation).ring)
        lines.append(
            f"  evaluated ({judged}): {', '.join(run.plan.metric_names)} on {site.held_out:,} rows that are held out; {size} bytes"
        )
        total += size * judged
    if e.secure.aggregation:
        told_by = "peers that you named" if host.peers is not None else "peers that the server names, see --peers"
        lines.append(f"  masked: the server learns sums over {e.secure.threshold} clients or more, not this site's part; with {told_by}")
    epsilon = spent.epsilon(host.delta)
    bounded = f"ε = {epsilon:.3g} at δ = {host.delta:g} after all rounds"
    protected = bounded if math.isfinite(epsilon) else "without bound: updates can give away records"
    limit = "" if host.epsilon is None else f"; this site stops at ε = {host.epsilon:g}"
    lines += [
        f"  in all at most {total:,.0f} bytes",
        f"privacy: {protected}{limit}",
        "never sent: inputs, labels, names of files, the site's secret",
        f"to take part: --accept {digest[:SHOWN]}",
    ]
    return "\n".join(lines)
