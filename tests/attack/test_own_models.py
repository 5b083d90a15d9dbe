"""Models of one's own that PyTorch's tools stumble over: they train all the same, and what cannot be done is said in one line."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedrts
from fedrts.engines import recorded
from fedrts.errors import Note

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.1, "density": 0.5}


def site(seed, count=20):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def plain(norm=None):
    torch.manual_seed(0)
    norms = [norm] if norm is not None else []
    return nn.Sequential(nn.Linear(6, 12), *norms, nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))


class Marked(nn.Module):
    """Leaves marks for a profiler."""

    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, x):
        with torch.profiler.record_function("forward"):
            return self.inner(x)


def trained(model, **given):
    return fedrts.train(model=model, clients=[site(seed) for seed in range(3)], test=site(9), **{**SMALL, **given})


@pytest.mark.parametrize("make", [Marked, lambda: nn.DataParallel(plain())], ids=["record_function", "DataParallel"])
def test_marks_for_a_profiler_do_no_harm(make):
    together, after_another = (trained(make(), engine=name) for name in ("batched", "serial"))
    torch.testing.assert_close(together.state.weights, after_another.state.weights)
    torch.testing.assert_close(together.state.weights, trained(plain(), engine="batched").state.weights)


def test_what_no_recording_takes_runs_one_after_the_other_and_says_why(monkeypatch):
    class Opaque:
        """What no text makes again, as a TorchScript object."""

        def __repr__(self):
            return "<opaque object>"

    plainly = torch.fx.Graph.call_function
    with_object = lambda self, func, args=(), kwargs=None: plainly(self, func, (*args, Opaque()), kwargs)  # type: ignore[arg-type]  # noqa: E731
    monkeypatch.setattr(torch.fx.Graph, "call_function", with_object)
    monkeypatch.setattr(recorded, "lean", lambda graph: None)
    with pytest.warns(Note, match="one after the other, not side by side: an operation of the model cannot be recorded .*<opaque object>"):
        result = trained(plain(), engine="batched")
    assert torch.equal(result.state.weights, trained(plain(), engine="serial").state.weights)


def test_clients_with_one_sample_under_batchnorm_are_told_of_once():
    clients = [site(0, 1), site(1), site(2, 1), site(3)]
    with pytest.warns(Note) as told:
        fedrts.train(model=plain(nn.BatchNorm1d(12)), clients=clients, test=site(9), **SMALL)
    assert [str(one.message).partition(":")[0] for one in told] == ["2 of 4 clients have one sample, of which BatchNorm has no statistics"]
    fedrts.train(model=plain(nn.LayerNorm(12)), clients=clients, test=site(9), **SMALL)  # any other note is an error here


class Embedded(nn.Module):
    """Sparse gradients, of which PyTorch says a page where it cannot batch them."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(9, 12, sparse=True), plain()
        self.into = nn.Linear(12, 6)

    def forward(self, x):
        return self.out(self.into(self.words((x.abs() * 3).long().clamp(max=8))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: torch.jit.script(plain()), "the model has parts of TorchScript"), (Embedded, "Could not run 'aten::select_backward'")],
    ids=["TorchScript", "sparse gradients"],
)
def test_why_clients_run_one_after_the_other_is_short(make, why):
    torch.manual_seed(0)
    with pytest.warns(Note, match="one after the other") as caught:
        result = trained(make(), engine="batched")
    (said,) = [str(entry.message) for entry in caught if "one after the other" in str(entry.message)]
    assert why in said
    assert len(said) < 300
    assert len(result.history) == 2


class Packs(nn.Module):
    """A GRU of packed sequences."""

    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(1, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.gru(nn.utils.rnn.PackedSequence(x.data[:, None], *x[1:]))[1][0])


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_packed_sequences_are_batches_too():
    def packed(samples):
        longest_first = sorted(samples, key=lambda sample: -len(sample[0]))
        return nn.utils.rnn.pack_sequence([x for x, _ in longest_first]), torch.stack([y for _, y in longest_first])

    clients = [[(x[: 2 + place % 4], y) for place, (x, y) in enumerate(zip(*site(seed).tensors, strict=True))] for seed in range(3)]
    result = fedrts.train(model=Packs(), clients=clients, test=clients[0], collate_fn=packed, **SMALL)
    assert result.history[-1]["loss"] is not None
