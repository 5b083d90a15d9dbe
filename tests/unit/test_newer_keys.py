"""Runs and comparisons that an earlier version began go on: keys that it did not know have their defaults."""

import json
import tomllib
from typing import Any

import pytest
import safetensors.torch
import tomli_w

import fedrts
from fedrts import config
from fedrts.errors import InputError
from fedrts.runs import checkpoint

TINY: dict[str, Any] = {
    "data": "digits",
    "clients": {"total": 4, "per_round": 2},
    "train": {"epochs": 1},
    "model_options": {"hidden": [8]},
    "device": "cpu",
}


def test_only_what_is_missing_is_filled_in():
    now = config.flat(config.resolve({"method": "fedrts"}).model_dump(mode="json"))
    old = {key: value for key, value in now.items() if key not in ("method_options.discount", "eval.every")} | {"train.lr": 7.0}
    filled = config.with_newer_keys(old, now)
    assert filled["method_options.discount"] == now["method_options.discount"] == 1.0
    assert filled["train.lr"] == 7.0
    assert config.with_newer_keys({**old, "no.such": 1}, now) == {**old, "no.such": 1}, "what cannot be read stays as it is"


@pytest.fixture
def older(tmp_path):
    """A run of two of four rounds whose version had no `discount`, and did not count uploads."""
    run = tmp_path / "run"
    fedrts.run(
        method="fedrts", rounds=4, out=run, checkpoint={"every": 1}, privacy={"clip": 1.0, "noise": 3.0, "index_epsilon": 0.5}, **TINY
    )
    (run / "summary.json").unlink()
    (newest, earlier) = sorted((run / "checkpoint").glob("*.safetensors"), reverse=True)
    newest.unlink()
    data = earlier.read_bytes()
    facts = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["fedrts"])
    del facts["experiment"]["method_options.discount"]
    earlier.unlink()
    tensors = safetensors.torch.load(data)
    del tensors["ledger.uploads"]
    data = safetensors.torch.save(tensors, metadata={"fedrts": json.dumps(facts)})
    (run / "checkpoint" / f"{earlier.name[:8]}-{checkpoint._digest(data)}.safetensors").write_bytes(data)
    settings = tomllib.loads((run / "experiment.toml").read_text())
    del settings["method_options"]["discount"]
    (run / "experiment.toml").write_text(tomli_w.dumps(settings))
    return run


def test_an_older_run_is_resumed(older):
    given_away = (older / "privacy.json").read_bytes()
    assert fedrts.resume(older).summary["rounds"] == 4
    assert (older / "privacy.json").read_bytes() == given_away


def test_a_newer_key_that_was_set_since_is_a_change(older):
    settings = tomllib.loads((older / "experiment.toml").read_text())
    settings["method_options"]["discount"] = 0.5
    (older / "experiment.toml").write_text(tomli_w.dumps(settings))
    with pytest.raises(InputError, match=r"method_options\.discount \(was 1.0, is 0.5\)"):
        fedrts.resume(older)


def test_an_older_comparison_goes_on(tmp_path):
    out = tmp_path / "compared"
    settings: dict[str, Any] = {**TINY, "rounds": 1}
    fedrts.compare(methods=["fedrts"], seeds=[0], out=out, **settings)
    declared = tomllib.loads((out / "compare.toml").read_text())
    del declared["shared"]["method_options"]["discount"]
    (out / "compare.toml").write_text(tomli_w.dumps(declared))
    assert len(fedrts.compare(methods=["fedrts"], seeds=[0, 1], out=out, **settings).rows) == 2
    del declared["shared"]["method_options"]["gamma"]
    (out / "compare.toml").write_text(tomli_w.dumps(declared))
    with pytest.raises(InputError, match=r"method_options\.gamma is 0.5, not 0.25"):
        fedrts.compare(methods=["fedrts"], seeds=[0, 1], out=out, method_options={"gamma": 0.25}, **settings)
