"""On a CPU `auto` looks at the arithmetic of a batch and at the number of parameters."""

import tomllib

import pytest

import fedrts


@pytest.mark.parametrize(("width", "engine"), [(256, "batched"), (600, "batched"), (800, "serial")])
def test_large_models_run_one_after_the_other(tmp_path, width, engine):
    """64 · w + w² + 10 · w parameters and as many biases as units: 0.08, 0.4 and 0.7 million; at most 1.1e7 MACs a batch."""
    fedrts.run(rounds=1, epochs=1, clients=4, per_round=2, device="cpu", model_options={"hidden": [width, width]}, out=tmp_path / "run")
    assert tomllib.loads((tmp_path / "run" / "experiment.toml").read_text("utf-8"))["engine"]["name"] == engine
