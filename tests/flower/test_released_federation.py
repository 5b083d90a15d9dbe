"""A study among sites outlives an upgrade: server and sites of 0.1 go on under this version, from the folders that they left.

`tests/released/0.1/federation` holds what fedrts 0.1.0 (commit 370405c) left of a study of six rounds among three sites whose server
was killed after the third: its run folder, and each site's own. The model and the summary beside it are the same study's, played to its
end by that version.
"""

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="fedrts[flower] is not installed")

import safetensors.torch
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedrts import api
from fedrts.errors import InputError
from fedrts.flower import deployment
from fedrts.flower.host import ANY, Host, Limits
from fedrts.flower.link import Address
from fedrts.flower.node import Worker
from fedrts.flower.state import Records
from linkhere import LinkHere, nobody_waits

pytestmark = pytest.mark.filterwarnings("ignore:the run began with")
KEPT = Path(__file__).parents[1] / "released" / "0.1" / "federation"
CLINICS = ("clinic-a", "clinic-b", "clinic-c")


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders as they were left, and the clinics' data beside them."""
    nobody_waits(monkeypatch)
    monkeypatch.setattr(deployment, "open_gate", lambda: None)
    left = Path(shutil.copytree(KEPT, tmp_path / "left"))
    for number, name in enumerate(CLINICS):
        rng = np.random.default_rng(number)
        y = rng.integers(0, 3, 160)
        np.savez(left / f"{name}.npz", x=(rng.standard_normal((160, 8)) + 2 * np.eye(8)[y]).astype(np.float32), y=y)
    return left


def clinics(left: Path, accept: str) -> LinkHere:
    """Nodes of all clinics, each with its own folder, whose owners accept an experiment."""
    link = LinkHere()
    for number, name in enumerate(CLINICS):
        key = ec.generate_private_key(ec.SECP256R1())
        host = Host(f"npz:{left / name}.npz", {"test": 0.25}, device="cpu", accept=[accept], limits=Limits(min_batch=1))
        link.private_keys[number], link.starts[number] = key, 1
        link.workers[number] = Worker(host, link.said.append, records=Records.of(left / name), key=key)
    return link


def resumed(left: Path, link: LinkHere, monkeypatch: pytest.MonkeyPatch) -> api.Result:
    """What `fedrts server` does with a study that has begun, over this link."""
    monkeypatch.setattr(deployment, "opened", lambda *_: contextlib.nullcontext(link))
    return api.resume(left / "study", door=deployment.Door(Address("127.0.0.1", 1), None), changes={"engine": {"wait": 1.0}})


def played(left: Path) -> list[dict[str, Any]]:
    """The lines of the history."""
    return [json.loads(line) for line in (left / "study" / "history.jsonl").read_text().splitlines()]


def test_a_study_of_an_earlier_release_goes_on(left: Path, monkeypatch: pytest.MonkeyPatch):
    before, roster = played(left), json.loads((left / "study" / "roster.json").read_text())
    link = clinics(left, ANY)
    result = resumed(left, link, monkeypatch)
    now = played(left)
    assert now[:2] == before[:2], "what a checkpoint holds stays"
    assert now[2]["federated"] == before[2]["federated"], "the round after it comes out the same"
    assert [record["clients"] for record in result.history] == [[0, 1, 2]] * 6
    again = json.loads((left / "study" / "roster.json").read_text())
    for name in ("samples", "data", "name", "since"):
        assert [member[name] for member in again.values()] == [member[name] for member in roster.values()], name
    then = safetensors.torch.load_file(KEPT.with_suffix(".safetensors"))
    for name, tensor in safetensors.torch.load_file(left / "study" / "model.safetensors").items():
        torch.testing.assert_close(tensor, then[name], rtol=1e-4, atol=1e-5, msg=f"{name}: that version ended with other numbers")
    ended = json.loads(KEPT.with_suffix(".json").read_text())
    for name in ("upload_bytes", "method", "density", "rejected_replies"):
        assert result.summary[name] == ended[name], name


def test_owners_accept_an_experiment_again_that_has_new_keys(left: Path, monkeypatch: pytest.MonkeyPatch):
    """They consented to all settings that there were: `--accept` of before the upgrade says nothing of those that have come since."""
    (before,) = json.loads((left / "clinic-a" / "accepted.json").read_text())["accepted"]
    link = clinics(left, before[:16])
    with pytest.raises(InputError, match="not reachable"):
        resumed(left, link, monkeypatch)
    for worker in link.workers.values():
        assert worker.parting is not None
        assert worker.parting.why == "refused"
        assert re.search(r"has not accepted the experiment [0-9a-f]{16}: look at it with --dry-run", worker.parting.text)
        assert before[:16] not in worker.parting.text
    assert len(played(left)) == 2, "nothing was lost, and nothing played without them"
