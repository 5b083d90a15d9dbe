"""A study outlives an upgrade: folders that earlier releases left go on, and what a later one wrote is refused in one line.

`tests/released/0.1` holds what fedrts 0.1.0 (commit 370405c) left of three runs of six rounds that were killed after the third, and
beside each the model and the summary of the same run, played to its end by that version. A study among sites is there too:
tests/flower/test_released_federation.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fedrts
from fedrts.audit.log import AuditLog
from fedrts.errors import InputError
from fedrts.files import NewerError
from fedrts.runs import checkpoint
from fedrts.runs.folder import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:the run began with")
RELEASED = Path(__file__).parents[1] / "released"
RUNS = sorted(file.parent for file in RELEASED.glob("*/*/experiment.toml"))


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder of 0.1, as it was left."""
    return Path(shutil.copytree(RELEASED / "0.1" / "fedrts", tmp_path / "run"))


@pytest.mark.parametrize("kept", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_folder_of_an_earlier_release_goes_on(kept: Path, tmp_path: Path):
    run = shutil.copytree(kept, tmp_path / "run")
    before = (run / "history.jsonl").read_text().splitlines()
    result = fedrts.resume(run)
    lines = (run / "history.jsonl").read_text().splitlines()
    done = json.loads(lines[2])["round"] + 1
    assert (len(before), done) == (3, 3 - (kept.name == "fedtiny")), "its set-up is a line too"
    assert lines[:3] == before, "what was played stays"
    assert result.summary["rounds"] == 6
    then = safetensors.torch.load_file(kept.with_suffix(".safetensors"))
    now = safetensors.torch.load_file(run / "model.safetensors")
    assert then.keys() == now.keys()
    for name, tensor in then.items():
        torch.testing.assert_close(now[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: that version ended with other numbers")
    ended = json.loads(kept.with_suffix(".json").read_text())
    for key in ("upload_bytes", "download_bytes", "method", "density"):
        assert result.summary[key] == ended[key], key


def test_what_is_written_now_says_its_format(left: Path):
    fedrts.resume(left)
    saved = max((left / "checkpoint").glob("*.safetensors")).read_bytes()
    header = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
    assert json.loads(header["__metadata__"]["fedrts"])["format"] == checkpoint.FORMAT
    fedrts.run(data="digits", rounds=1, clients={"total": 2, "per_round": 2}, device="cpu", out=left.parent / "new")
    assert "format = 1" in (left.parent / "new" / "experiment.toml").read_text()


def test_a_folder_of_a_later_format_is_refused(left: Path):
    file = left / "experiment.toml"
    file.write_text(file.read_text().replace('fedrts = "0.1.0"', 'fedrts = "9.0.0"\nformat = 7'))
    for use in (fedrts.resume, fedrts.load):
        with pytest.raises(InputError, match=r"run has format 7, and this fedrts \(.*\) knows formats up to 1: install a later one"):
            use(left)


def test_a_checkpoint_of_a_later_format_is_refused_and_not_called_damaged(left: Path):
    fedrts.resume(left)
    (left / "summary.json").unlink()
    newest = max((left / "checkpoint").glob("*.safetensors"))
    data = newest.read_bytes()
    facts = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["fedrts"])
    later = safetensors.torch.save(safetensors.torch.load(data), metadata={"fedrts": json.dumps({**facts, "format": 2})})
    newest.with_name(f"{newest.name[:8]}-{checkpoint._digest(later)}.safetensors").write_bytes(later)
    newest.unlink()
    files = sorted((left / "checkpoint").iterdir())
    with pytest.raises(NewerError, match="the newest checkpoint has format 2"):
        fedrts.resume(left)
    assert sorted((left / "checkpoint").iterdir()) == files, "nothing of it was put aside"
    assert RunFolder(left).summary() is None


def test_an_audit_log_of_a_later_format_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fedrts.audit import log as logs

    monkeypatch.setattr(logs, "FORMAT", 2)
    later = AuditLog(tmp_path / "audit.jsonl", "server")
    later("open")
    later.close()
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"audit\.jsonl has format 2"):
        AuditLog(tmp_path / "audit.jsonl", "server")("open")


def test_a_sites_folder_of_a_later_format_is_refused(tmp_path: Path):
    pytest.importorskip("flwr", reason="fedrts[flower] is not installed")
    from fedrts.flower.state import Records

    Records.of(tmp_path / "a.site").close()
    assert (tmp_path / "a.site" / "format").read_text() == "1\n"
    (tmp_path / "a.site" / "format").write_text("2\n")
    with pytest.raises(InputError, match=r"a\.site has format 2"):
        Records.of(tmp_path / "a.site")
    (tmp_path / "a.site" / "format").unlink()  # of before there were such numbers
    Records.of(tmp_path / "a.site").close()
