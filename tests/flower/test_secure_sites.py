"""Secure sums among sites with data of their own: what the server opens of updates, metrics and statistics, and what nodes refuse."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from federating import trusting
from fedrts import config
from fedrts.client.order import Order
from fedrts.errors import InputError
from fedrts.flower import WORK, deployment
from fedrts.flower.consent import described
from fedrts.flower.deployment import introduction
from fedrts.flower.fleet import Fleet
from fedrts.flower.host import Host
from fedrts.flower.messages import opened
from fedrts.flower.node import Worker
from fedrts.flower.normalisation import common
from fedrts.flower.openings import Openings
from fedrts.flower.roster import Roster
from fedrts.flower.secret import SecretEngine
from fedrts.flower.site import Site
from fedrts.flower.state import Records
from fedrts.runs.build import Assembled, assemble
from fedrts.secure.call import METRICS, STATISTICS, UPDATE, Call, Invited, joined, parted
from fedrts.secure.errors import SecureError
from fedrts.secure.identity import public_key, signer
from fedrts.secure.opener import Opener
from fedrts.secure.participant import Participant
from fedrts.secure.ring import Ring
from fedrts.server.assessment import assessment
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.server.rounds import play
from linkhere import LinkHere, nobody_waits

SITES = 5


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


def images(folder: Path, number: int) -> str:
    """A site's images: two classes that differ in brightness, every site brighter than the one before, with more of them."""
    rng, count = np.random.default_rng(number), 40 + 8 * number
    y = np.arange(count) % 2
    x = (rng.integers(0, 80, (count, 3, 4, 4)) + 90 * y[:, None, None, None] + 15 * number).astype(np.uint8)
    np.savez(folder / f"{number}.npz", x=x, y=y)
    return f"npz:{folder / f'{number}.npz'}"


def study(*, aggregation: bool = True, **keywords: Any) -> Assembled:
    base = {
        "method": "fedrts",
        "model": "mlp",
        "model_options": {"hidden": [12]},
        "data": "elsewhere",
        "data_options": {"shape": [3, 4, 4], "classes": 2},
        "density": 0.5,
        "rounds": 3,
        "clients": {"total": SITES, "per_round": SITES},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "eval": {"every": 1},
        "engine": {"name": "flower", "timeout": 5, "wait": 0.5},
        "secure": {"aggregation": aggregation},
    }
    return assemble(config.resolve(base, config.from_keywords(keywords)))


def hosts(folder: Path, *silent: int, **decided: Any) -> list[Host]:
    """A site for every number; those that are `silent` hold nothing out."""
    shares = [0.0 if number in silent else 0.25 for number in range(SITES)]
    return [trusting(data=images(folder, number), options={"test": share}, **decided) for number, share in enumerate(shares)]


def federated(run: Assembled, link: LinkHere, hosts: list[Host], folder: Path | None = None) -> Assembled:
    for number, host in enumerate(hosts):
        link.start(7 + number, [])
        link.workers[7 + number] = Worker(host, link.said.append, records=link.records[7 + number], key=link.private_keys[7 + number])
    roster = Roster(len(hosts), folder / "roster.json" if folder else None, keyed=False)
    people = Fleet(link, introduction(run), roster, None, "", None, link.said.append)  # type: ignore[arg-type]
    return deployment._with_fleet(run, people, folder)


def sites(link: LinkHere) -> list[Site]:
    return [worker.site for worker in link.workers.values() if worker.site is not None]


def played(run: Assembled) -> tuple[list[dict[str, Any]], torch.Tensor]:
    steps = list(play(run.plan, run.method.begin(run.setup), -1, ClientRecords.of(run.plan.guard)))
    return [step.record.as_dict() for step in steps], steps[-1].state.values


def test_who_claims_most_samples_by_far_is_named_before_the_first_round(tmp_path: Path):
    link = LinkHere()
    federated(study(), link, hosts(tmp_path))
    assert not any("guard.max_claim" in line for line in link.said)
    said: list[str] = []
    deployment._warn_of_claims(Guard(max_claim=10.0), [50, 60, 10**9, 40], said.append)
    assert said == [
        "client 2: 1,000,000,000 samples, more than guard.max_claim = 10 medians; secure sums count them all: "
        "make sure that you know who claims so many"
    ]
    link = LinkHere()
    federated(
        study(guard={"max_claim": 1.0}), link, [*hosts(tmp_path)[:-1], trusting(data=images(tmp_path, SITES - 1), options={"test": 0.0})]
    )
    assert any("more than guard.max_claim = 1 medians" in line for line in link.said)


def test_metrics_and_statistics_are_sums_too(tmp_path: Path):
    """The server has their means, to the rounding, and nothing of one site."""
    link = LinkHere()
    run = federated(study(), link, hosts(tmp_path))
    lines, values = played(run)
    measured = common((len(site._rows(0)), site._described) for site in sites(link) if site._described is not None)
    assert measured is not None
    assert run.plan.engine.facts["normalisation"] == pytest.approx(measured.numbers, abs=1e-6)  # type: ignore[attr-defined]
    assert measured.numbers != run.plan.engine.facts["normalisation"]  # type: ignore[attr-defined]
    told = lines[-1]["federated"]
    assert (told["clients"], told["mean_of_clients"], told["missing"]) == ([], {}, [])
    held_out = [site.held_out for site in sites(link)]
    assert told["samples"] == sum(held_out)
    exact = {"loss": 0.0, "accuracy": 0.0}
    for site in sites(link):
        bench, data = site.run.bench, site.run.bench.data
        bench.layout.bind(bench.module, bench_weights(run, values))
        found = data.judge(bench.module, data.test_x, data.test_y, 64)
        for name in exact:
            exact[name] += found[name] * site.held_out / sum(held_out)
    assert told["mean"]["accuracy"] == pytest.approx(exact["accuracy"], abs=1e-6)
    assert told["mean"]["loss"] == pytest.approx(exact["loss"], abs=1e-4)
    assert lines[-1]["accuracy"] == told["mean"]["accuracy"]
    introduced = link.workers[7].site.introduction()  # type: ignore[union-attr]
    assert "statistics" not in introduced
    assert introduced["channels"] == 3


def bench_weights(run: Assembled, values: torch.Tensor) -> torch.Tensor:
    """The last model of a run whose mask does not change after it."""
    state = [step.state for step in play(run.plan, run.method.begin(run.setup), -1)][-1]
    assert torch.equal(state.values, values)  # sums that were opened before are read again
    return state.weights.clone()


def test_the_same_sites_in_the_open_come_to_nearly_the_same(tmp_path: Path):
    """One inner round: all the difference is rounding, and the last digits of the normalisation."""
    settings: dict[str, Any] = {
        "method": "fedavg",
        "density": 1.0,
        "rounds": 1,
        "wire": {"value_type": "float32"},
        "guard": {"max_share": 1.0},
    }
    lines, values = played(federated(study(**settings), LinkHere(), hosts(tmp_path)))
    open_lines, expected = played(federated(study(aggregation=False, **settings), LinkHere(), hosts(tmp_path)))
    assert float((values - expected).abs().max()) < 1e-4
    assert lines[0]["federated"]["mean"]["accuracy"] == pytest.approx(open_lines[0]["federated"]["mean"]["accuracy"], abs=1e-6)
    assert len(open_lines[0]["federated"]["clients"]) == SITES


def test_every_kind_of_sum_is_opened_once_in_its_place(tmp_path: Path):
    link = LinkHere()
    run = federated(study(), link, hosts(tmp_path), tmp_path)
    played(run)
    digest = sites(link)[0].digest
    openings = link.records[7].openings
    assert openings is not None
    assert openings.opened == {digest: {0: 2}, f"{digest} metrics": {0: 2}, f"{digest} statistics": {0: 0}}
    assert (tmp_path / "openings" / "00000000-statistics.sum").exists()
    assert {file.name for file in (tmp_path / "openings").glob("*-metrics.sum")} >= {"00000002-metrics.sum"}
    kept = json.loads((tmp_path / "normalisation.json").read_text())
    assert run.plan.engine.facts["normalisation"] == [*kept["mean"], *kept["std"]]  # type: ignore[attr-defined]


def test_a_server_that_forgot_its_sums_is_told_no_metrics_again(tmp_path: Path):
    link = LinkHere()
    run = federated(study(rounds=1, guard={"attempts": 1}), link, hosts(tmp_path))
    played(run)
    engine = run.plan.engine
    assert isinstance(engine, SecretEngine)
    engine.openings = Openings(None)
    site = sites(link)[0]
    for purpose in (UPDATE, METRICS, STATISTICS):
        with pytest.raises(SecureError, match="has helped to open round 0: no round is opened twice"):
            site.confidant.answer("advertise", 0, calling(link, purpose=purpose, attempt=9).encoded)  # type: ignore[union-attr]


@pytest.mark.parametrize("by", ["this version", "0.2.0"])
def test_metrics_that_are_read_again_are_the_same_though_a_site_is_asked_no_more(by: str, tmp_path: Path):
    """The server was killed before its checkpoint, and then leaves out the site that holds most rows out: n_max was another one."""
    link = LinkHere()
    run = federated(study(rounds=1), link, hosts(tmp_path), tmp_path)
    (line,), values = played(run)
    ledger = ClientRecords.of(run.plan.guard)
    if by == "this version":
        ledger.strikes.quarantine(SITES - 1, "its replies")
    else:
        for file in (tmp_path / "openings").glob("*.sum"):
            head, words = parted(file.read_bytes())
            told = {name: value for name, value in json.loads(head).items() if name not in ("samples", "most_samples")}
            file.write_bytes(joined([json.dumps(told).encode(), words]))
    (again,) = play(run.plan, run.method.begin(run.setup), 0, ledger)
    assert torch.equal(again.state.values, values)
    assert again.record.as_dict()["federated"] == line["federated"] | {"bytes": again.record.as_dict()["federated"]["bytes"]}


def test_too_few_that_hold_rows_out_are_no_sum(tmp_path: Path):
    link = LinkHere()
    lines, _ = played(federated(study(rounds=1), link, hosts(tmp_path, 0, 2)))
    told = lines[0]["federated"]
    assert (told["mean"], told["samples"]) == ({}, 0)
    assert [entry["client"] for entry in told["missing"]] == [1, 3, 4]
    assert all(records.opened(sites(link)[0].digest, 0, METRICS) == -1 for records in link.records.values())


def test_owners_who_tell_no_statistics_are_not_asked(tmp_path: Path):
    link = LinkHere()
    run = federated(study(rounds=1), link, hosts(tmp_path, keep_statistics=True))
    assert "normalisation" not in run.plan.engine.facts  # type: ignore[attr-defined]
    site = sites(link)[0]
    with pytest.raises(SecureError, match="client 0 takes no part in sums of statistics"):
        site.confidant.answer("advertise", 0, calling(link, purpose=STATISTICS).encoded)  # type: ignore[union-attr]
    assert [line["clients"] for line in played(run)[0]] == [[0, 1, 2, 3, 4]]


def test_a_site_lost_while_metrics_are_summed_is_left_out(tmp_path: Path):
    link = LinkHere()
    run = federated(study(rounds=1, engine={"timeout": 1}), link, hosts(tmp_path))

    def silent(message: Any, worker: Worker) -> Any:
        facts = opened(message)[0]
        return None if facts.get("exchange") == 1 and facts.get("sum") == "mask" else worker.reply(message)

    link.manners[9] = silent
    lines, _ = played(run)
    told = lines[0]["federated"]
    assert lines[0]["clients"] == [0, 1, 2, 3, 4]
    assert [entry["client"] for entry in told["missing"]] == [2]
    assert told["samples"] == sum(site.held_out for number, site in enumerate(sites(link)) if number != 2)
    assert 0 <= told["mean"]["accuracy"] <= 1


# -- what nodes refuse ------------------------------------------------------------------------------------------------


def calling(link: LinkHere, **changes: Any) -> Call:
    """A call of all sites, as the server makes it."""
    purpose, here = changes.get("purpose", UPDATE), sites(link)
    count = {METRICS: [site.held_out for site in here]}.get(purpose, [len(site._rows(0)) for site in here])
    roster = tuple(Invited(client, count[client], public_key(link.private_keys[7 + client])) for client in range(SITES))
    given = {"run": bytes.fromhex(here[0].digest), "round": 0, "attempt": 0, "threshold": 4, "roster": roster, "most_samples": 999}
    return Call(**{**given, **changes})


def test_a_site_is_no_two_clients_and_no_peer_is(tmp_path: Path):
    """Several clients with the victim's key would sum up its own update; with a colluding node's, one node would be a quorum."""
    link = LinkHere()
    federated(study(), link, hosts(tmp_path))
    site = sites(link)[0]
    assert site.confidant is not None
    keys = [public_key(link.private_keys[7 + client]) for client in range(SITES)]
    samples = len(site._rows(0))
    for roster in ([keys[0]] * SITES, [keys[0], *[keys[1]] * 4]):
        invited = tuple(Invited(client, samples, key) for client, key in enumerate(roster))
        for pinned in (None, keys):
            site.confidant.pinned = pinned
            with pytest.raises(SecureError, match="one key for several clients"):
                site.confidant.answer("advertise", 0, calling(link, roster=invited).encoded)


def test_a_site_opens_a_round_once_under_whatever_number(tmp_path: Path):
    """Called as client 0 in one sum and as client 1 in another, it has a part in both, and the same rows are in them."""
    link = LinkHere()
    federated(study(), link, hosts(tmp_path))
    site = sites(link)[0]
    assert site.confidant is not None
    keys = [link.private_keys[7 + client] for client in range(SITES)]
    openings = {}
    for number, owners in ((0, keys), (1, [*keys[1:2], keys[0], *keys[2:]])):
        roster = tuple(Invited(client, len(site._rows(0)), public_key(key)) for client, key in enumerate(owners))
        call = calling(link, roster=roster)
        opener = Opener(call, ring := Ring(SITES, 12, 4))
        peers = {client: Participant(call, client, signer(key), lambda: None) for client, key in enumerate(owners) if client != number}
        opener.advertised(number, site.confidant.answer("advertise", number, call.encoded))
        for client, peer in peers.items():
            opener.advertised(client, peer.advertise())
        peers[number] = site.confidant.under_way[number]
        for take, step in ((opener.shared, "share"), (opener.masked, "mask"), (opener.endorsed, "endorse")):
            told = {"share": opener.adverts, "endorse": opener.survivors}.get(step, bytes)()
            for client, peer in peers.items():
                given = (opener.deal(client), ring, np.zeros(4, np.uint32)) if step == "mask" else (told,)
                take(client, getattr(peer, step)(*given))
        openings[number] = opener.endorsements()
    assert site.confidant.answer("reveal", 0, openings[0])
    with pytest.raises(SecureError, match="client 1 has helped to open round 0 before: no round is opened twice"):
        site.confidant.answer("reveal", 1, openings[1])


def test_a_larger_roster_needs_as_large_a_share(tmp_path: Path):
    """t alone of many more would let fewer nodes collude."""
    link = LinkHere()
    federated(study(), link, hosts(tmp_path))
    site = sites(link)[0]
    assert site.confidant is not None
    more = [public_key(ec.generate_private_key(ec.SECP256R1())) for _ in range(2)]
    for purpose, threshold, why in (
        (UPDATE, 6, "a sum of 7 clients where a round has 5"),
        (METRICS, 5, "a threshold of 5 where the experiment has 6"),
    ):
        plain = calling(link, purpose=purpose)
        roster = (*plain.roster, *(Invited(SITES + number, 10, key) for number, key in enumerate(more)))
        with pytest.raises(SecureError, match=why):
            site.confidant.answer("advertise", 0, replace(plain, roster=roster, threshold=threshold).encoded)


def test_a_call_for_one_thing_is_no_call_for_another(tmp_path: Path):
    """The place of an opening is signed: an order of training in a call for metrics is refused, and unknown purposes are."""
    link = LinkHere()
    run = federated(study(), link, hosts(tmp_path))
    site = sites(link)[0]
    assert site.confidant is not None
    with pytest.raises(SecureError, match="takes no part in sums of more"):
        site.confidant.answer("advertise", 0, calling(link, purpose=b"more").encoded)
    assert calling(link).digest != calling(link, purpose=STATISTICS).digest
    engine = run.plan.engine
    assert isinstance(engine, SecretEngine)
    order = swapped(run)
    found = engine.figures(order, {client: site.held_out for client, site in enumerate(sites(link))}, lambda n: figure_form(run, n))
    assert found.clients == ()
    assert any("metrics are asked for by an order of something else" in line for line in link.said)


def test_statistics_are_told_once_and_metrics_where_the_experiment_evaluates(tmp_path: Path):
    """In a second sum of all sites but one, the difference would be that site's."""
    link = LinkHere()
    run = federated(study(rounds=20, eval={"every": 5}), link, hosts(tmp_path))
    site = sites(link)[0]
    assert site.confidant is not None
    with pytest.raises(SecureError, match="told once, in round 0"):
        site.confidant.answer("advertise", 0, calling(link, purpose=STATISTICS, round=1).encoded)
    engine, state = run.plan.engine, run.method.begin(run.setup)
    assert isinstance(engine, SecretEngine)
    held_out = {client: one.held_out for client, one in enumerate(sites(link))}
    for index, why in ((3, "metrics of round 3, which the experiment does not evaluate"), (4, None)):
        number = len(run.plan.exchanges(run.plan.round(index, state.mask)))
        order = Order.of(assessment(run.plan.metric_names), run.plan.round(index, state.mask, number), run.layout, state, 1)
        found = engine.figures(order, held_out, lambda n: figure_form(run, n))
        assert len(found.clients) == (SITES if why is None else 0)
        assert why is None or sum(why in line for line in link.said) == SITES


def swapped(run: Assembled) -> Any:
    """An order of training."""
    from helping import order_of

    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    return order_of(run, exchange, state, 0)


def figure_form(run: Assembled, clients: int) -> Any:
    from fedrts.client.figures import FigureForm

    return FigureForm.of_metrics(run.plan.metrics, run.experiment.secure, clients)


def test_a_folder_that_lost_its_openings_sums_no_more(tmp_path: Path):
    """A file that is missing is no file in which nothing stands."""
    folder = tmp_path / "site"
    first = Records.of(folder)
    first.open("d", 0, 3)
    first.close()
    again = Records.of(folder)
    assert (again.opened("d", 0), again.opened("d", 0, METRICS)) == (3, -1)
    again.close()
    (folder / "openings.json").unlink()
    lost = Records.of(folder)
    with pytest.raises(InputError, match=r"openings.json is missing, and rounds might be opened twice: restore it from a backup"):
        lost.opened("d", 0)
    with pytest.raises(InputError, match="is missing"):
        lost.open("d", 0, 4)
    lost.close()


def test_an_owner_sees_what_a_site_says_in_sums(tmp_path: Path):
    link = LinkHere()
    federated(study(), link, hosts(tmp_path))
    site = sites(link)[0]
    shown = described(site, site.digest)
    assert "channels: 3" in shown
    assert "loss, accuracy on 10 rows that are held out" in shown


def test_nobody_opens_a_sum_of_fewer_than_the_quorum(tmp_path: Path):
    """With sites it is all of them by default: opened without one, a round could neither count nor be repeated."""
    link = LinkHere()
    run = federated(study(rounds=2, engine={"timeout": 1}), link, hosts(tmp_path))
    lost: list[int] = []

    def silent_once(message: Any, worker: Worker) -> Any:
        facts = opened(message)[0]
        if facts.get("round") == 1 and facts.get("exchange") == 0 and facts.get("sum") == "mask" and not lost:
            lost.append(2)
            return None
        return worker.reply(message)

    link.manners[9] = silent_once
    lines, _ = played(run)
    assert lost == [2]
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4]] * 2


def test_an_owner_is_told_of_as_many_bytes_as_leave(tmp_path: Path):
    """Four of five update the model in a round; metrics and statistics are sums over all, with more shares in every message."""
    link, left = LinkHere(), Counter[int]()

    def counted(message: Message, worker: Worker) -> Message:
        reply = worker.reply(message)
        if message.metadata.message_type == WORK:
            left[next(node for node, one in link.workers.items() if one is worker)] += sum(map(len, opened(reply)[1].values()))
        return reply

    link.manners = dict.fromkeys(range(7, 7 + SITES), counted)
    lines, _ = played(federated(study(clients={"total": SITES, "per_round": 4}), link, hosts(tmp_path), tmp_path))
    always = [client for client in range(SITES) if all(client in line["clients"] for line in lines)]
    assert always
    for client in always:
        site = sites(link)[client]
        (said,) = re.findall(r"in all at most ([\d,]+) bytes", described(site, site.digest))
        assert 0.95 < left[7 + client] / int(said.replace(",", "")) <= 1
