"""What secure sums cost a client of ResNet-18: seconds of its processor in a round, and bytes of its upload.

    python benchmarks/secure.py [--quick] [--density 0.1] [--threads 1] [--json FILE]
    python benchmarks/secure.py --accuracy

Everything that one of n clients does in an inner round is timed, from its weights to the shares that it reveals, by the functions
that a node calls: digest of the model, outcomes, rounding, all five steps of the protocol, and packing. Its bytes are those of
all its messages, against the same weights in float32 and in int8; amortised: nine inner rounds and an outer one, whose votes are
among a tenth of the inactive links. In the same run: masks for as many peers by Flower's own primitives (a Mersenne twister behind
a seed of 32 bits, whole numbers of 64 bits).

--accuracy: digits with and without secure sums, seeds 0 to 2, instead. With votes among all links what is left of the difference is
rounding, and outcomes and votes that count clients rather than samples.

--json: {n: {client_s, upload_ratio, …}}. benchmarks/results/secure.md is one such run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

import fedrts
from fedrts import __version__, methods
from fedrts.client.order import Order
from fedrts.client.summing import SumForm, Summing
from fedrts.methods.contract import Round, Setup, State
from fedrts.secure.call import Call, Invited
from fedrts.secure.identity import public_key, signer
from fedrts.secure.opener import Opener
from fedrts.secure.participant import Participant
from fedrts.secure.ring import Ring, Words
from fedrts.secure.settings import SecureSums
from fedrts.sparse import random
from fedrts.sparse.schedule import Schedule
from fedrts.wire.value_types import FORMATS
from server import resnet18_layout

INTERVAL = 10
SEEDS = (0, 1, 2)
AIMS = {"client_s": 0.2, "upload_ratio": 1.0, "amortised_ratio": 1.15}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process's processor, and what came of it."""
    started = time.process_time()
    found = work()
    return time.process_time() - started, found


class Model:
    """ResNet-18 on a mask, its orders, and what a client has after training."""

    def __init__(self, density: float) -> None:
        self.layout = resnet18_layout()
        self.method = methods.get(methods.DEFAULT)(density=density)
        weights = torch.randn(self.layout.length, generator=torch.Generator().manual_seed(0)) * 0.01
        self.state = self.method.begin(Setup(self.layout, weights, (3, 32, 32), rng=lambda purpose: random.key(0, purpose)))
        self.outer, self.inner = (self._order(index) for index in (0, 1))
        self.trained = {"weights": self.state.values + torch.randn_like(self.state.values) * 0.01}
        self.summing = Summing(SecureSums(), 0)

    def _order(self, index: int) -> Order:
        current = Round.of(index, Schedule(interval=INTERVAL), self.state.mask, self.layout)
        (exchange,) = self.method.exchanges(current)
        return Order.of(exchange.with_whole_uploads(), current, self.layout, self.state, key=0)

    def form(self, order: Order, clients: int) -> SumForm:
        return self.summing.form(order, self.method, clients)

    def words(self, clients: int) -> tuple[Ring, Words]:
        """What a node does between training and masking, see `flower.confidant`: check the call's form, and round what it has."""
        order, form = self.inner, self.form(self.inner, clients)
        form.digest(order)
        contribution = self.method.contribution(self.trained, State(order.reference, order.frame.mask), order.round)  # type: ignore[arg-type]
        return form.ring, form.words(contribution, order, 1.0, self.summing.key(order.round.index, 0))


def one_client(n: int, model: Model, key: ec.EllipticCurvePrivateKey) -> tuple[float, int]:
    """Seconds and bytes of the first of n clients in an inner round; the others' words are cut to one."""
    table = SecureSums()
    ring, short = model.form(model.inner, n).ring, Ring(n, table.bits, 1, 0)
    roster = tuple(Invited(client, 500, public_key(key)) for client in range(n))
    call = Call(bytes(32), 0, 0, table.needed(n), roster, 500)
    clients = {client: Participant(call, client, signer(key), lambda: None) for client in range(n)}
    opener = Opener(call, ring)
    spent, sent = 0.0, 0

    def mine(work: Callable[[], Any]) -> bytes:
        nonlocal spent, sent
        seconds, data = timed(work)
        spent, sent = spent + seconds, sent + len(data)
        return bytes(data)

    for client, one in clients.items():
        opener.advertised(client, one.advertise() if client else mine(one.advertise))
    adverts = opener.adverts()
    for client, one in clients.items():
        opener.shared(client, one.share(adverts) if client else mine(lambda one=one: one.share(adverts)))  # type: ignore[misc]
    dealt = opener.deal(0)
    opener.masked(0, mine(lambda: clients[0].mask(dealt, *model.words(n))))
    opener._masked += list(range(1, n))  # their words are not looked at
    for client in range(1, n):
        clients[client].mask(opener.deal(client), short, np.zeros(short.words, np.uint32))
    survivors = opener.survivors()
    for client, one in clients.items():
        opener.endorsed(client, one.endorse(survivors) if client else mine(lambda one=one: one.endorse(survivors)))  # type: ignore[misc]
    endorsements = opener.endorsements()
    mine(lambda: clients[0].reveal(endorsements))
    return spent, sent


def flowers(n: int, values: int) -> float:
    """Seconds of the masks of one client with n − 1 peers and itself, and of its rounding, by Flower's primitives."""
    from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_mod
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    weights = [np.random.default_rng(0).standard_normal(values) * 0.01]

    def work() -> None:
        total = quantize(weights, 3.0, 2**22)
        for peer in range(n):
            total = parameters_addition(total, pseudo_rand_gen(peer.to_bytes(32, "big"), 2**32, [(values,)]))
        parameters_mod(total, 2**32)

    return timed(work)[0]


def accuracy() -> None:
    """The accuracy of digits, mean of the last ten rounds, and bytes of uploads."""
    secure = {"aggregation": True}
    kinds = {"open, int8": {}, "secure": secure, "secure, `votes_among = 1`": {**secure, "votes_among": 1.0}}
    print("| sums | accuracy by seed | mean | uploads |\n| --- | --- | --- | --- |")
    for name, table in kinds.items():
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for seed in SEEDS:
                ran = fedrts.run(data="digits", wire={"value_type": "int8"}, seed=seed, secure=table, out=f"{folder}/{seed}")
                found.append(ran.summary)
        shares = [one["accuracy_last10"] for one in found]
        uploads = statistics.mean(one["upload_bytes"] for one in found) / 1e6
        print(
            f"| {name} | {', '.join(f'{share:.4f}' for share in shares)} | {statistics.mean(shares):.4f} | {uploads:.1f} MB |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 and 30 clients, once")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accuracy", action="store_true", help="accuracy on digits with and without, instead")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.accuracy:
        accuracy()
        return
    torch.set_num_threads(options.threads)
    model = Model(options.density)
    values = len(model.state.values)
    float32 = 4 * values
    int8 = FORMATS["int8"].most(values, None)
    key, repeat = ec.generate_private_key(ec.SECP384R1()), 1 if options.quick else 3
    counters = dict(model.form(model.outer, 10).counters)
    found: dict[int, dict[str, float]] = {}
    print(f"fedrts {__version__}, torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} thread(s)")
    kinds = f"{values:,} values, {counters['core']:,} outcomes, {counters['votes']:,} votes of outer rounds"
    print(f"ResNet-18 at {options.density:g}: {kinds}\n")
    print("| clients | client, s | of Flower's masks, s | upload / float32 | amortised | upload / int8 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for n in (10, 30) if options.quick else (10, 30, 100):
        turns = [one_client(n, model, key) for _ in range(repeat)]
        client, (_, inner) = statistics.median(seconds for seconds, _ in turns), turns[0]
        outer = inner - model.form(model.inner, n).ring.size + model.form(model.outer, n).ring.size
        amortised = ((INTERVAL - 1) * inner + outer) / (INTERVAL * float32)
        theirs = flowers(n, values)
        found[n] = {
            "client_s": client,
            "upload_ratio": inner / float32,
            "amortised_ratio": amortised,
            "int8_ratio": inner / int8,
            "flower_s": theirs,
        }
        print(f"| {n} | {client:.3f} | {theirs:.2f} | {inner / float32:.3f} | {amortised:.3f} | {inner / int8:.2f} |", flush=True)
    print(f"\naims: client ≤ {AIMS['client_s']} s at n = 100; upload ≤ {AIMS['upload_ratio']} and ≤ {AIMS['amortised_ratio']} at n ≤ 16")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({str(n): row for n, row in found.items()}, file, indent=2)


if __name__ == "__main__":
    main()
