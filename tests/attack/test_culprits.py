"""Whose training it was that failed: an error names its client and round, and stays the error that it is."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedrts import config, methods
from fedrts.client.order import Order, called
from fedrts.data.contract import Data
from fedrts.engines.batched import BatchedEngine
from fedrts.engines.kernels import Objective, Vectorised
from fedrts.engines.serial import SerialEngine
from fedrts.errors import InputError, blaming, reason
from fedrts.runs.build import Assembled, assemble
from fedrts.server.rounds import play_round

Toy = Callable[..., Assembled]


def stumbling(monkeypatch: pytest.MonkeyPatch, run: Assembled, client: int, error: Exception) -> None:
    """Reading the rows of one client fails."""
    mine = run.rows[client]

    def made(whole: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Data, rows: torch.Tensor, *rest: Any) -> Any:
            if bool(torch.isin(rows, mine).any()):
                raise error
            return whole(self, rows, *rest)

        return read

    for name in ("training_batch", "training_batches"):
        monkeypatch.setattr(Data, name, made(getattr(Data, name)))


def batched(run: Assembled, slots: int = 3, workers: int = 1) -> Assembled:
    bench = run.bench
    kernel = Vectorised(Objective(bench.module, bench.data.task, bench.layout))
    serial = SerialEngine(bench, run.rows, 64)
    return replace(run, plan=replace(run.plan, engine=BatchedEngine(bench, run.rows, kernel, slots, slots, serial, workers)))


def failure(run: Assembled, index: int = 1) -> Exception:
    with pytest.raises((RuntimeError, InputError, ValueError)) as caught:
        play_round(run.plan, run.method.begin(run.setup), index)
    return caught.value


def test_one_client_after_the_other_the_very_one_is_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    run, error = toy(), RuntimeError("stumbled")
    client = run.plan.sample(1)[1]
    stumbling(monkeypatch, run, client, error)
    assert failure(run) is error, "its kind and traceback stay"
    assert str(error) == "stumbled"
    assert f"\nRuntimeError: stumbled\nround 1, client {client}\n" in "".join(traceback.format_exception(error))
    assert reason(error) == f"stumbled (round 1, client {client})"


def test_what_a_user_can_mend_stays_one_line(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    run, error = toy(), InputError("this row is damaged: mend it")
    client = run.plan.sample(1)[2]
    stumbling(monkeypatch, run, client, error)
    assert failure(run) is error
    assert str(error) == reason(error) == f"round 1, client {client}: this row is damaged: mend it"


def test_the_set_up_is_named_too(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    run, error = toy("snip"), RuntimeError("stumbled")
    client = run.plan.sample(-1)[0]
    stumbling(monkeypatch, run, client, error)
    failure(batched(run), -1)
    assert error.__notes__ == [f"set-up, client {client}"]


def test_side_by_side_those_are_named_among_whom_it_is(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    run, error = toy(), RuntimeError("stumbled")
    clients = run.plan.sample(1)
    stumbling(monkeypatch, run, clients[1], error)
    failure(batched(run))
    assert error.__notes__ == [f"round 1, one of clients {', '.join(map(str, clients))}"]


@pytest.mark.parametrize(("slots", "workers"), [(1, 1), (3, 3)])
def test_where_a_client_works_alone_it_is_the_one(toy: Toy, monkeypatch: pytest.MonkeyPatch, slots: int, workers: int) -> None:
    run, error = toy(), RuntimeError("stumbled")
    client = run.plan.sample(1)[1]
    stumbling(monkeypatch, run, client, error)
    failure(batched(run, slots, workers))
    assert error.__notes__ == [f"round 1, client {client}"]


def test_side_by_side_a_client_that_rewires_is_the_one(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    run, error, calls = toy("feddst"), ValueError("no link is left"), []

    def rewired(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return whole(*arguments, **keywords)

    kind: Any = methods.get("feddst")
    whole = kind.rewired
    monkeypatch.setattr(kind, "rewired", rewired)
    failure(batched(run), 0)
    assert error.__notes__ == [f"round 0, client {run.plan.sample(0)[1]}"], "once, by who knows most"


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_a_round_that_fails_says_whose_replies_did_not_count(toy: Toy) -> None:
    run = toy(train={"lr": 1e30, "epochs": 2}, clients={"total": 2, "per_round": 2}, guard={"attempts": 1})
    assert "(clients 0, 1: 'weights' is not finite)" in str(failure(run, 0))


def test_many_clients_are_not_all_named() -> None:
    assert called([3]) == "client 3"
    assert called([1, 4]) == "clients 1, 4"
    assert called(range(1000)) == f"clients {', '.join(map(str, range(20)))}, …"


def test_the_first_name_stays() -> None:
    error = InputError("wrong", "and more")
    with pytest.raises(InputError), blaming("outside"), blaming("inside"):
        raise error
    assert error.args[0].startswith("inside: ")
    assert "outside" not in str(error)


def test_a_site_answers_for_its_other_clients_and_names_the_culprit(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own screen; the server hears a fixed phrase, and nothing of the site's data."""
    pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
    from federating import trusting
    from fedrts.client import envelope
    from fedrts.flower.deployment import introduction
    from fedrts.flower.node import Worker

    keywords = {"engine": {"name": "flower"}}
    settings = {**toy().experiment.model_dump(exclude_none=True, exclude={"out"}), **keywords}
    said: list[str] = []
    run = assemble(config.resolve(settings))
    worker = Worker(trusting(clients=[0, 3]), said.append)
    worker.meet(introduction(run))
    assert worker.site is not None
    stumbling(monkeypatch, worker.site.run, 3, RuntimeError("row 17 of patients.csv is damaged"))
    state = run.method.begin(run.setup)
    current = run.plan.round(1, state.mask)
    order = Order.of(run.plan.exchanges(current)[0], current, run.layout, state, key=0)
    facts, replies = worker.site.answer({client: envelope.encode_order(order, client, None) for client in (3, 0)})
    assert list(replies) == [0]
    assert facts == {"missing": [], "failed": [3], "reasons": ["its work failed (RuntimeError); its own screen says why"]}
    assert said[-1] == "no answer for client 3: row 17 of patients.csv is damaged (round 1, client 3)"
