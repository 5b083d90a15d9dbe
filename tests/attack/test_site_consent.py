"""A server must not own a site: what it may ask, and what the owner has to agree to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import tomllib

import tomli_w
import torch
from flwr.app import Message

import fedrts
from federating import NO_LIMITS, Folder, processes, trusting
from fedrts import config, models
from fedrts.errors import InputError
from fedrts.flower import HELLO, PROTOCOL, STRANGER, WORK, consent, messages, policy
from fedrts.flower.host import Host, Limits, digest_prefix, memory_size
from fedrts.flower.inside import TaskIdentity
from fedrts.flower.node import Worker
from fedrts.flower.site import Site, accepted

EXPERIMENT: dict[str, Any] = {
    "method": "fedrts",
    "model": "mlp",
    "data": "npz:/elsewhere/coordinator.npz",
    "model_options": {"hidden": [8, 8]},
    "rounds": 4,
    "density": 0.5,
    "clients": {"total": 2, "per_round": 2, "partition": "sites"},
    "train": {"epochs": 1, "batch_size": 10, "lr": 0.1},
}
ONE_SITE = {"total": 1, "per_round": 1, "partition": "sites"}


def asked(**changes: Any) -> dict[str, Any]:
    """The introduction of a server whose experiment is changed so."""
    met = {"protocol": PROTOCOL, "fedrts": fedrts.__version__}
    return {**met, "experiment": tomli_w.dumps(config.merged(EXPERIMENT, changes)), "input_shape": [6], "classes": 3}


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A site's own 500 rows."""
    y = np.arange(500) % 3
    np.savez(tmp_path / "own.npz", x=np.random.default_rng(0).standard_normal((500, 6)).astype(np.float32), y=y)
    return f"npz:{tmp_path}/own.npz"


def silent(text: str) -> None: ...


# -- splits and floors are the site's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"test": 0.998}, {"validation": 0.99}, {"test": 0.5, "validation": 0.9}])
def test_a_server_cannot_leave_a_site_with_few_of_its_rows(data: str, options: dict[str, float]):
    site = Site.of(trusting(data=data), asked(data_options=options)["experiment"], asked())
    assert site.introduction()["samples"][0] >= 400


def test_the_owner_decides_how_the_sites_data_is_split(data: str):
    said = asked(data_options={"test": 0.998, "augment": False})
    experiment = accepted(said["experiment"], trusting(data=data, options={"test": 0.1}))
    assert experiment.data_options == {"test": 0.1, "augment": False}
    site = Site.of(trusting(data=data, options={"test": 0.1}), said["experiment"], said)
    assert site.introduction()["samples"] == [450]


@pytest.mark.parametrize(
    ("allowed", "changes", "words"),
    [
        (Limits(), {}, None),
        (Limits(min_samples=401), {}, "--min-samples 401"),
        (Limits(min_samples=399), {"train": {"batch_size": 201}}, "201 of the 400 rows"),
        (Limits(), {"train": {"batch_size": 1}}, "--min-batch 8"),
        (Limits(), {"train": {"epochs": 101}}, "--max-epochs 100"),
        (Limits(max_epochs=0), {"train": {"epochs": 101}}, None),
        (Limits(max_parameters=150), {}, "--max-parameters"),
        (Limits(max_memory=1000), {}, "--max-memory"),
    ],
)
def test_what_an_owner_does_not_allow_is_refused(data: str, allowed: Limits, changes: dict[str, Any], words: str | None):
    said, host = asked(**changes), trusting(data=data, options={"test": 0.2}, limits=allowed)
    if words is None:
        Site.of(host, said["experiment"], said)
        return
    with pytest.raises(InputError, match=words):
        Site.of(host, said["experiment"], said)


@pytest.mark.parametrize("hidden", [[10**6, 10**6], [1] * 20_000])
def test_a_model_that_is_too_large_takes_neither_memory_nor_time(data: str, hidden: list[int]):
    said, started = asked(model_options={"hidden": hidden}), time.monotonic()
    with pytest.raises(InputError, match="more than the 100,000,000 parameters"):
        Site.of(Host(data=data), said["experiment"], said)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", models.names())
def test_every_model_can_be_measured_before_it_takes_memory(name: str, tmp_path: Path):
    """Where a model could not be built without memory, the limit would come too late."""
    shape, classes = ((16,), 50) if "gpt" in name or name == "tabular" else ((3, 32, 32), 10)
    if models.models.is_path(name):
        pytest.importorskip("transformers", reason="fedrts[text] is not installed")
        sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
        name, shape, classes = name.replace("PATH", str(tmp_path)), (16,), 50
    made_on = []

    def build() -> torch.nn.Module:
        made_on.append(torch.empty(0).device.type)
        return models.get(name)(shape, classes)

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build().parameters())
    with pytest.raises(InputError, match="--max-parameters"):
        policy.built(build, Limits(max_parameters=count // 2))
    assert made_on == ["meta", "meta"]


# -- consent ------------------------------------------------------------------------------------------------------------


def test_without_consent_a_node_takes_no_part_and_names_the_option(data: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Site, "of", lambda *_: pytest.fail("nothing is built for an experiment that nobody accepted"))
    said: list[str] = []
    worker, digest = Worker(Host(data=data), said.append), consent.digest(asked())
    answer = worker.meet(asked())
    assert set(answer) == {"refused"}
    assert f"--accept {digest[:16]}" in answer["refused"]
    assert worker.parting is not None
    assert f"--accept {digest[:16]}" in worker.parting.text
    assert worker.site is None


@pytest.mark.parametrize("length", [8, 16, 64])
def test_an_owner_accepts_by_digest(data: str, length: int):
    digest = consent.digest(asked())
    assert "samples" in Worker(Host(data=data, accept=[digest[:length]]), silent).meet(asked())
    assert "refused" in Worker(Host(data=data, accept=["0" * length]), silent).meet(asked())


@pytest.mark.parametrize(
    "changed",
    [
        asked(rounds=5),
        asked(train={"lr": 0.2}),
        asked(privacy={"clip": 1.0}),
        {**asked(), "classes": 4},
        {**asked(), "input_shape": [3, 2]},
    ],
    ids=["rounds", "lr", "privacy", "classes", "shape"],
)
def test_a_changed_experiment_needs_consent_again(data: str, changed: dict[str, Any]):
    worker = Worker(Host(data=data, accept=[consent.digest(asked())]), silent)
    assert "samples" in worker.meet(asked())
    before = worker.site
    assert "has not accepted" in worker.meet(changed)["refused"]
    assert worker.site is before, "the one that was accepted stays as it was accepted"
    assert "samples" in worker.meet(asked())


def test_the_digest_is_of_what_is_asked_and_not_of_how_it_is_written():
    settings = tomllib.loads(asked()["experiment"])
    other = tomli_w.dumps(dict(reversed(settings.items())))
    assert other != asked()["experiment"]
    assert consent.digest({**asked(), "experiment": "# a remark\n" + other, "fedrts": "9.9"}) == consent.digest(asked())


@pytest.mark.parametrize(
    "changes", [{"experiment": 7}, {"experiment": "a ="}, {"classes": "x"}, {"input_shape": 3}, {"input_shape": ["1"]}]
)
def test_an_introduction_that_is_none_is_refused_in_one_line(changes: dict[str, Any]):
    (text,) = Worker(trusting(), silent).meet({**asked(), **changes}).values()
    assert "\n" not in text
    assert "the server's" in text


def test_on_a_terminal_the_owner_is_asked_once(data: str, tmp_path: Path):
    asked_for: list[str] = []

    def no(text: str) -> bool:
        asked_for.append(text)
        return False

    worker = Worker(Host(data=data, state=tmp_path / "site"), silent, no)
    assert "declined" in worker.meet(asked())["refused"]
    assert "declined" in worker.meet(asked())["refused"]
    assert len(asked_for) == 1
    assert worker.site is None
    assert "4 rounds" in asked_for[0]
    worker.records.close()
    yes = Worker(Host(data=data, state=tmp_path / "site"), silent, lambda text: True)
    assert "samples" in yes.meet(asked())


def test_consent_outlasts_the_process_and_is_on_record(data: str, tmp_path: Path):
    digest, host = consent.digest(asked()), Host(data=data, state=tmp_path / "site")
    first = Worker(Host(data=data, state=tmp_path / "site", accept=[digest[:12]]), silent)
    assert "samples" in first.meet(asked())
    first.records.close()
    record = json.loads((tmp_path / "site" / "accepted.json").read_text())
    assert record["in_force"] == digest
    assert list(record["accepted"]) == [digest]
    again = Worker(host, silent)
    assert "samples" in again.meet(asked())
    assert "refused" in again.meet(asked(train={"epochs": 2}))
    again.records.close()


def test_consent_to_anything_is_for_this_process_alone(data: str, tmp_path: Path):
    worker = Worker(trusting(data=data, state=tmp_path / "site"), silent)
    assert "samples" in worker.meet(asked())
    worker.records.close()
    assert "refused" in Worker(Host(data=data, state=tmp_path / "site"), silent).meet(asked())


def test_work_for_an_experiment_that_was_not_accepted_is_not_done(data: str):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    worker = Worker(Host(data=data), silent)
    for kind in (HELLO, WORK):
        message = Message(messages.content(asked() if kind == HELLO else {}, {0: b"an order"}), 1, kind)
        message.metadata.__dict__["_message_id"] = message.object_id
        reply = worker.reply(message)
    assert messages.opened(reply) == ({STRANGER: True}, {})


# -- looking before one leaps --------------------------------------------------------------------------------------------


def test_a_dry_run_shows_what_would_leave_and_takes_no_part(data: str):
    shown: list[str] = []
    said_here: list[str] = []
    table = {"clip": 1.0, "noise": 5.0, "index_epsilon": 1.0}

    def declining(text: str) -> bool:
        shown.append(text)
        return False

    worker = Worker(Host(data=data, dry_run=True, accept=["any"]), silent, declining)
    said = asked(privacy=table)
    assert worker.meet(said) == {"refused": "it only looks (dry run)"}
    assert worker.parting is not None
    worker.parting.obey(said_here.append)  # no error: it was a good end
    assert "dry run" in said_here[0]
    assert worker.site is None
    (text,) = shown
    site = Site.of(Host(data=data), said["experiment"], said)
    assert f"--accept {consent.digest(said)[:16]}" in text
    for words in ("weights on the mask", "names of the Q inactive links", " bytes a client", "ε = ", "never sent"):
        assert words in text
    assert f"samples: {site.introduction()['samples']}" in text


def test_a_dry_run_shows_that_the_site_would_judge_the_model(data: str):
    said = asked()
    for options, words in (({"test": 0.2}, "evaluated (4): loss, accuracy on 100 rows that are held out"), ({}, None)):
        shown: list[str] = []
        host = Host(data=data, options=options, dry_run=True)
        Worker(host, silent, lambda text, shown=shown: bool(shown.append(text))).meet(said)  # type: ignore[misc]
        assert (words in shown[0]) if words else ("evaluated" not in shown[0]), shown[0]


# -- the options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abc", "all", "g" * 16, "", "1234567"])
def test_what_is_no_digest_is_refused(text: str):
    with pytest.raises(InputError, match="--accept"):
        digest_prefix(text)


def test_sizes_of_memory():
    assert [memory_size(text) for text in ("4GB", "500MB", "1.5 gb", "1000")] == [4 * 10**9, 5 * 10**8, 15 * 10**8, 1000]
    for text in ("much", "-1GB", "4 bytes"):
        with pytest.raises(InputError, match="--max-memory"):
            memory_size(text)


@pytest.mark.slow  # real processes: a minute
@pytest.mark.timeout(400)
def test_an_owner_looks_then_accepts(tmp_path: Path, data: str):
    folder = Folder(tmp_path / "study", nodes=1, experiment=tomli_w.dumps({**EXPERIMENT, "data": data, "rounds": 2, "clients": ONE_SITE}))
    client = [*(word for word in folder.site(0) if word not in NO_LIMITS), "--data", data]
    with processes() as start:
        server = start(*folder.server())
        look = start(*client, "--dry-run")
        assert look.ended() == 0, look.text
        digest = look.until("to take part: --accept").split()[-1]
        shy = start(*client)
        assert shy.ended() == 77
        assert f"--accept {digest}" in shy.text
        assert "connected: node" not in server.text
        start(*client, "--accept", digest, "--max-memory", "16GB")
        assert server.ended() == 0, server.text
    roster = json.loads((folder.path / "run" / "roster.json").read_text())
    kept = json.loads((folder.keys[0].with_suffix(".site") / "accepted.json").read_text())
    assert kept["in_force"].startswith(digest)
    assert len(roster["0"]["data"]) == 64, "the keyed fingerprint"
