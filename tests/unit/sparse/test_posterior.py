import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedrts.sparse import posterior, random


@given(st.integers(1, 30), st.floats(0.1, 100), st.integers(0, 10**6))
def test_observation_is_equation_6(links, scale, seed):
    torch.manual_seed(seed)
    alpha, beta = torch.rand(links) + 1, torch.rand(links) + 1
    at = torch.randperm(links)[: (links + 1) // 2]
    outcome = torch.rand(len(at))
    new_alpha, new_beta = posterior.observe(alpha, beta, outcome, scale, at)
    for i in range(links):
        x = outcome[at.tolist().index(i)].item() if i in at.tolist() else None
        a, b = (0, 0) if x is None else (scale * x, scale * (1 - x))
        assert math.isclose(new_alpha[i].item(), alpha[i].item() + a, rel_tol=1e-5)
        assert math.isclose(new_beta[i].item(), beta[i].item() + b, rel_tol=1e-5)


@pytest.mark.parametrize("at", [None, torch.tensor([0, 2])])
def test_posteriors_keep_their_precision(at):
    """Outcomes of a model in float64 do not change it: the next round observes some links only."""
    found = posterior.observe(torch.ones(3), torch.ones(3), torch.full((3 if at is None else 2,), 0.5, dtype=torch.float64), 10.0, at)
    assert [part.dtype for part in found] == [torch.float32] * 2
    assert torch.equal(found[0], torch.tensor([6.0, 6.0 if at is None else 1.0, 6.0]))


def test_observing_every_link_is_observing_each():
    alpha, beta, outcome = torch.rand(20) + 1, torch.rand(20) + 1, torch.rand(20)
    everywhere = posterior.observe(alpha, beta, outcome, 10.0)
    each = posterior.observe(alpha, beta, outcome, 10.0, torch.arange(20))
    assert all(torch.allclose(a, b) for a, b in zip(everywhere, each, strict=True))


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (11.0, 1.0), (3.5, 8.5), (8.5, 3.5), (1.0, 3001.0), (2000.0, 1000.0)])
def test_draws_follow_the_beta_distribution(a, b):
    xi = posterior.draw(torch.full((20_000,), a), torch.full((20_000,), b), key=5)
    assert xi.dtype == torch.float32
    assert xi.min() > 0
    assert xi.max() < 1
    assert stats.kstest(xi.double().numpy(), stats.beta(a, b).cdf).pvalue > 1e-4


def test_draws_are_a_function_of_the_key_and_not_of_threads(monkeypatch):
    alpha, beta = torch.full((600_000,), 2.0), torch.full((600_000,), 3.0)
    first = posterior.draw(alpha, beta, key=1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert torch.equal(first, posterior.draw(alpha, beta, key=1))
    assert not torch.equal(first, posterior.draw(alpha, beta, key=2))
    chunks = first[: 2 * posterior._CHUNK].view(2, -1)
    assert abs(torch.corrcoef(chunks)[0, 1]) < 5 / posterior._CHUNK**0.5, "chunks are independent"


def test_extreme_posteriors_stay_finite():
    alpha = torch.tensor([1.0, 1e7, 1.0, 1e30])
    beta = torch.tensor([1e7, 1.0, 1.0, 1e30])
    xi = posterior.draw(alpha, beta, key=0)
    assert torch.isfinite(xi).all()
    assert xi[0] < 1e-3
    assert xi[1] > 0.999
    assert xi[3] == pytest.approx(0.5, abs=1e-3)


def test_draws_on_a_cpu_are_numpys_and_stay_so():
    """A resumed run, or one of a later version, must draw the same topology: chunk by chunk a stream of SFC64."""
    links = (1 << 16) + 3
    alpha, beta = torch.full((links,), 2.0), torch.linspace(1.0, 9.0, links)
    drawn = posterior.draw(alpha, beta, key=11)
    for start, stop in ((0, 1 << 16), (1 << 16, links)):
        stream = np.random.Generator(np.random.SFC64(random.key(11, start)))
        a, b = (stream.standard_gamma(shape[start:stop].numpy(), dtype=np.float32) for shape in (alpha, beta))
        assert np.array_equal(drawn[start:stop].numpy(), a / (a + b))
