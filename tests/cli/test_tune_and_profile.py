"""`fedrts run --tune --profile` as a person uses it."""

import gzip
import json

TINY = ["--rounds", "3", "--set", "train.epochs=1", "--clients", "6", "--per-round", "3"]


def test_tune_and_profile(fedrts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = [*TINY, "--set", "model_options.hidden=[16]", "--device", "cpu"]
    first = fedrts("run", *small, "--tune", "--profile", "--out", tmp_path / "a")
    assert (first.code, first.err.count("\n")) == (0, 1)
    assert str(tmp_path / "a" / "profile") in first.err  # where to look
    assert "samples/s" in first.out
    assert "remembered" not in first.out
    events = json.loads(gzip.decompress((tmp_path / "a" / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {"fedrts: clients", "fedrts: update", "fedrts: evaluation"} <= {event.get("name") for event in events}
    tables = (tmp_path / "a" / "profile" / "profile.txt").read_text()
    assert tables.startswith("1 rounds")
    assert all(word in tables for word in ("clients", "guard", "sums", "update", "evaluation", "writing", "other", "aten::"))
    seconds = {words[0]: float(words[1]) for line in tables.splitlines()[3:10] if (words := line.split())}
    assert all(seconds[name] > 0 for name in ("clients", "guard", "sums", "update", "evaluation"))
    assert seconds["other"] < sum(seconds.values()) / 2, "phases cover most of a round"
    second = fedrts("run", *small, "--tune", "--out", tmp_path / "b")
    assert second.code == 0
    assert "remembered" in second.out
    assert not (tmp_path / "b" / "profile").exists()
