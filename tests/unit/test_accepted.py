"""Every row of the table in docs/python.md is a case that is trained here, or refused."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch

import fedrts
from fedrts.errors import InputError, Note
from fedrts.observe import Silent
from fedrts.testing import accepted
from fedrts.testing.accepted import CASES, TwoInputs, everyone, halves, net

USUAL: dict[str, Any] = {"method": "fedrts", "density": 0.8, "rounds": 2, "lr": 0.2, "epochs": 1, "batch_size": 4, "engine": "batched"}


def trained(given):
    """The run of a case, with the notes that it gave."""
    torch.manual_seed(0)
    initial = net().state_dict() if "model" not in given else None
    model = given.get("model") or net()
    if initial is not None:
        model.load_state_dict(initial)
    elif isinstance(model, TwoInputs):
        for name, tensor in TwoInputs().state_dict().items():
            model.get_parameter(name).data.copy_(tensor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        result = fedrts.train(**{**USUAL, **given, "model": model})
    return result, [str(entry.message) for entry in caught if entry.category is Note]


@cache
def reference(two):
    """The weights that plain datasets with the same rows lead to."""
    given = everyone(halves) | {"model": TwoInputs()} if two else everyone(torch.utils.data.TensorDataset)
    return trained(given)[0].state.weights


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.replace("`", ""))
def test_a_case_is_taken_or_refused_as_the_table_says(case):
    if case.needs:
        pytest.importorskip(case.needs, reason=f"fedrts[{case.needs}] is not installed")
    given = case.arguments()
    if case.refused:
        with pytest.raises(InputError) as caught:
            trained(given)
        assert case.refused in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    result, notes = trained(given)
    one_by_one = [text for text in notes if "one after the other" in text]
    assert bool(one_by_one) == bool(case.why), notes
    if case.why:
        assert case.why in one_by_one[0]
    assert not case.says or any(case.says in text for text in notes), notes
    assert len(result.history) == 2
    assert torch.isfinite(torch.tensor(result.summary["loss"]))
    if case.same:
        assert torch.equal(result.state.weights, reference(isinstance(given.get("model"), TwoInputs)))


@pytest.mark.parametrize("kernel", ["vectorised", "streamed"])
def test_engines_agree_on_trees(kernel):
    given = everyone(accepted.dictionaries)
    serial, batched = (
        trained({**given, "model": TwoInputs(), "engine": engine})[0] for engine in ("serial", {"name": "batched", "kernel": kernel})
    )
    torch.testing.assert_close(serial.state.weights, batched.state.weights, rtol=0, atol=1e-5)
    assert serial.history[-1]["flops"] == batched.history[-1]["flops"] > 0


@pytest.mark.parametrize("method", ["fedtiny", "feddst", "grasp", "prunefl"])
def test_every_kind_of_step_takes_trees(method):
    options = {"method_options": {"abns": True}} if method == "fedtiny" else {}
    plain, named = (
        trained({**everyone(make), "model": TwoInputs(), "method": method, "topology": {"interval": 1}, **options})[0]
        for make in (halves, accepted.dictionaries)
    )
    assert torch.equal(plain.state.weights, named.state.weights)
    assert plain.summary["accuracy"] is not None


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_rows_that_do_not_stack_resume_to_the_same_bits(tmp_path):
    case = next(case for case in CASES if "pads" in case.what)

    class Stop(Silent):
        def played(self, record):
            if record.round == 1:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    state = case.arguments()["model"].state_dict()
    for observer in (Stop(), None):
        given = case.arguments()
        given["model"].load_state_dict(state)
        keywords = {**USUAL, **given, "engine": "serial", "rounds": 3, "out": tmp_path / "run"}
        if observer is not None:
            with pytest.raises(KeyboardInterrupt):
                fedrts.train(**keywords, observer=observer)
        else:
            resumed = fedrts.train(**keywords, resume=True)
            again = case.arguments()
            again["model"].load_state_dict(state)
            assert torch.equal(resumed.state.weights, fedrts.train(**{**USUAL, **again, "engine": "serial", "rounds": 3}).state.weights)
            other = case.arguments()
            other["clients"][0][0] = (other["clients"][0][0][0] + 1, other["clients"][0][0][1])
            with pytest.raises(InputError, match="data is not that of the checkpoint"):
                fedrts.train(**{**keywords, **other, "rounds": 4}, resume=True)


def test_the_table_has_a_row_for_every_case():
    listed = [row[0] for row in accepted.table()]
    assert len(listed) == len(set(listed)), "two rows alike"
    assert [what for what in listed if not what.startswith("**")][1:] == [case.what for case in CASES]
