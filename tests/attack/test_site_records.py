"""What a site keeps for itself: its secret, the privacy that it has spent, and the words of its errors."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

from flwr.app import Message
from scipy import stats

from federating import trusting
from fedrts import config
from fedrts.client.privacy import Account, Protection, Unpredictable, spent
from fedrts.client.workbench import Workbench
from fedrts.errors import InputError
from fedrts.flower import HELLO, WORK, messages
from fedrts.flower.deployment import introduction
from fedrts.flower.inside import TaskIdentity
from fedrts.flower.node import Worker
from fedrts.flower.site import Site
from fedrts.flower.state import Records
from fedrts.runs.build import Assembled, assemble
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from helping import order_of

NOISE = {"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}


def study(**changes: Any) -> Assembled:
    """The run of a server whose sites have data of their own."""
    base = {
        "model": "mlp",
        "data": "toy_images",
        "model_options": {"hidden": [12, 10]},
        "rounds": 9,
        "density": 0.5,
        "clients": {"total": 2, "per_round": 2, "partition": "sites", "min_size": 1},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "engine": {"name": "flower"},
    }
    return assemble(config.resolve(base, changes))


def order(run: Assembled, index: int = 0, client: int = 0) -> dict[int, bytes]:
    """What the server of a run sends to a client."""
    state = run.method.begin(run.setup)
    sent = order_of(run, run.plan.exchanges(run.plan.round(index, state.mask))[0], state, index)
    header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), state.mask.fingerprint, index, 0, client)
    return {client: codec.encode(header, sent.exchange.down, sent.sent, sent.frame, None)}


def met(run: Assembled, **decided: Any) -> Site:
    """A site that takes part in a run."""
    worker = Worker(trusting(**decided), lambda text: None)
    assert "samples" in worker.meet(introduction(run))
    assert worker.site is not None
    return worker.site


def answer(worker: Worker, kind: str, facts: dict[str, Any], blobs: dict[int, bytes] | None = None) -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(messages.content(facts, blobs), 1, kind)
    message.metadata.__dict__["_message_id"] = message.object_id
    return worker.reply(message)


# -- the fingerprint ----------------------------------------------------------------------------------------------------


def test_the_fingerprint_of_a_sites_own_data_is_keyed_and_stays_the_same(tmp_path: Path):
    run = study()
    here = met(run, state=tmp_path / "a")
    told = here.introduction()["data"]
    assert told != run.data.fingerprint
    assert run.data.fingerprint not in told
    here.records.close()
    assert met(run, state=tmp_path / "a").introduction()["data"] == told
    assert met(run, state=tmp_path / "b").introduction()["data"] != told
    divided = study(clients={"partition": "iid"})
    assert met(divided, state=tmp_path / "c", clients=[0]).introduction()["data"] == divided.data.fingerprint


# -- the folder ---------------------------------------------------------------------------------------------------------


def test_nobody_else_can_read_the_sites_folder(tmp_path: Path):
    folder = tmp_path / "site"
    records = Records.of(folder)
    records.accept("a" * 64)
    records.spend("a" * 64, 0, Account(1.0, 2.0))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    names = ("secret", "privacy.json", "accepted.json", "lock", "openings.json", "format")
    assert modes == {"site": 0o700, **dict.fromkeys(names, 0o600)}
    assert len((folder / "secret").read_bytes()) == 32


def test_two_processes_do_not_share_a_sites_folder(tmp_path: Path):
    first = Records.of(tmp_path / "site")
    with pytest.raises(InputError, match=r"another client uses .* --state"):
        Records.of(tmp_path / "site")
    first.close()
    Records.of(tmp_path / "site").close()


@pytest.mark.parametrize("name", ["secret", "privacy.json", "accepted.json"])
@pytest.mark.parametrize("damage", [b"", b"{", b'{"before": {"square": -1}}', b'{"accepted": 7}', None])
def test_a_damaged_record_is_named_and_never_replaced(tmp_path: Path, name: str, damage: bytes | None):
    records = Records.of(tmp_path)
    records.spend("a" * 64, 0, Account(1.0, 0.0))
    records.close()
    file = tmp_path / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    others = {path: path.read_bytes() for path in tmp_path.iterdir() if path != file}
    with pytest.raises(InputError, match=rf"{name} is (damaged|missing)"):
        Records.of(tmp_path)
    assert (file.read_bytes() if file.exists() else None) == damage
    assert all(path.read_bytes() == content for path, content in others.items())


# -- the privacy that is spent ------------------------------------------------------------------------------------------


def test_what_a_site_has_spent_survives_a_restart_and_counts_over_all_experiments(tmp_path: Path):
    allowed = next(n for n in range(20) if spent(Protection(**NOISE), n + 1, n + 1)["total"] > 8.0)  # type: ignore[operator]
    assert allowed >= 3
    found = []
    for number in range(allowed + 2):
        run = study(privacy=NOISE, seed=number % 2)
        site = met(run, state=tmp_path / "site", epsilon=8.0)
        facts, replies = site.answer(order(run))
        found.append(len(replies))
        site.records.close()
    assert found == [1] * allowed + [0, 0]
    assert facts["reasons"] == ["the ε = 8 of this site is spent"]


def test_what_is_spent_is_on_disk_before_the_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, written = study(privacy=NOISE), []
    site = met(run, state=tmp_path / "site")
    work = Workbench.work

    def watched(self: Workbench, *arguments: Any) -> Any:
        written.append(json.loads((tmp_path / "site" / "privacy.json").read_text())["sent"])
        return work(self, *arguments)

    monkeypatch.setattr(Workbench, "work", watched)
    for index in range(2):
        site.answer(order(run, index))
    assert [entry["0"]["square"] for entry in written] == [pytest.approx(0.16), pytest.approx(0.32)]


def test_nothing_leaves_where_what_is_spent_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = study(privacy=NOISE)
    site = met(run, state=tmp_path / "site")

    def full(path: Path, data: bytes) -> None:
        raise InputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("fedrts.flower.state.write_privately", full)
    facts, replies = site.answer(order(run))
    assert not replies
    assert str(tmp_path) not in facts["reasons"][0]


def test_what_left_unprotected_has_no_bound_ever_after(tmp_path: Path):
    run = study()
    site = met(run, state=tmp_path / "site")
    assert site.answer(order(run))[1]
    site.records.close()
    later = study(privacy=NOISE)
    facts, replies = met(later, state=tmp_path / "site", epsilon=100.0).answer(order(later))
    assert not replies
    assert facts["reasons"] == ["what left this site before has no bounded ε"]


def test_clients_of_one_experiment_are_counted_apart_also_after_a_restart(tmp_path: Path):
    records = Records.of(tmp_path)
    for client in (0, 1, 1):
        records.spend("first", client, Account(1.0, 0.5))
    records.close()
    again = Records.of(tmp_path)
    assert [again.spent("first", client) for client in (0, 1, 2)] == [Account(1.0, 0.5), Account(2.0, 1.0), Account()]
    assert again.spent("second", 0) == again.given_away == Account(2.0, 1.0)


# -- noise --------------------------------------------------------------------------------------------------------------


def test_no_predictable_generator_is_touched_on_a_node(monkeypatch: pytest.MonkeyPatch):
    run = study(privacy=NOISE)
    site, question = met(run), order(run)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a node draws from numpy's generator")

    for name in ("default_rng", "PCG64", "Generator", "RandomState", "normal", "standard_normal", "choice"):
        monkeypatch.setattr(np.random, name, forbidden)
    first, second = (site.answer(question)[1] for _ in range(2))
    assert first
    assert first != second


def test_unpredictable_numbers_are_gaussian_and_uniform():
    draws, count = Unpredictable(), 200_001
    drawn = draws.gaussian(count)
    assert drawn.shape == (count,)
    assert stats.kstest(drawn, "norm").statistic < 0.006  # exceeded by chance once in a million times
    assert abs(np.corrcoef(drawn[: count // 2], drawn[count // 2 : -1])[0, 1]) < 0.02
    places = np.bincount([draws.place(np.array([0.0, 0.25, 0.75, 0.0])) for _ in range(20_000)], minlength=4) / 20_000
    assert places[[0, 3]].tolist() == [0, 0]
    assert places[1] == pytest.approx(0.25, abs=0.016)
    taken = np.bincount(np.concatenate([draws.subset(np.arange(10), 3) for _ in range(20_000)]), minlength=10) / 20_000
    assert taken == pytest.approx(np.full(10, 0.3), abs=0.02)
    assert sorted(draws.subset(np.arange(10), 10)) == list(range(10))


# -- errors that travel ---------------------------------------------------------------------------------------------------

SECRET = "patient 4711, HIV"


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, OSError, AssertionError, InputError])
def test_no_error_of_the_work_carries_data_to_the_server(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]):
    def failing(*_: Any) -> None:
        raise kind(f"cannot train on {SECRET}")

    run = study()
    said: list[str] = []
    worker = Worker(trusting(), said.append)
    assert messages.opened(answer(worker, HELLO, introduction(run)))[0]["samples"]
    monkeypatch.setattr(Workbench, "work", failing)
    reply = answer(worker, WORK, {}, order(run))
    told = str(reply.error.reason) if reply.has_error() else str(messages.opened(reply)[0])
    assert "its work failed" in told
    assert SECRET not in told
    assert kind.__name__ in told
    assert any(SECRET in line for line in said), "its own screen says why"


def test_no_error_of_the_data_carries_paths_or_labels_to_the_server(tmp_path: Path):
    said: list[str] = []
    facts = {**introduction(study()), "experiment": introduction(study())["experiment"].replace("toy_images", "npz:/elsewhere")}
    for number, (name, x, y) in enumerate(
        (
            ("HIV", np.zeros((50, 1, 6, 6), np.float32), np.arange(50) - 11),
            ("HIV", np.full((50, 1, 6, 6), np.nan, np.float32), np.arange(50) % 3),
            ("HIV", np.zeros((50, 3, 5), np.float32), np.arange(50) % 3),
            ("HIV", np.zeros((50, 1, 6, 6), np.float32), np.arange(50) % 7),
        )
    ):
        np.savez(tmp_path / f"{name}-{number}.npz", x=x, y=y)
        worker = Worker(trusting(data=f"npz:{tmp_path}/{name}-{number}.npz"), said.append)
        (told,) = worker.meet(facts).values()
        assert not any(word in told for word in ("HIV", str(tmp_path), "7", "(3, 5)")), told
        assert len(told) > 20
        assert worker.parting is not None
        said.append(worker.parting.text)
    assert any("HIV" in line for line in said), "its own screen says why"


def test_what_is_wrong_with_the_servers_own_words_it_is_told():
    worker = Worker(trusting(), lambda text: None)
    facts = introduction(study())
    for changed, words in (
        (facts["experiment"].replace("rounds = 9", "turns = 9"), "unknown key 'turns'"),
        (facts["experiment"].replace('model = "mlp"', 'model = "os:getcwd"'), "--allow os:getcwd"),
        (facts["experiment"].replace('"sites"', '"iid"'), "--partition"),
    ):
        assert words in worker.meet({**facts, "experiment": changed})["refused"]
    run = study()
    assert "samples" in worker.meet(facts)
    damaged = {0: order(run)[0][:-1] + b"?"}
    assert "checksum" in messages.opened(answer(worker, WORK, {}, damaged))[0]["reasons"][0]
