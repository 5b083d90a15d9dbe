"""FedRTS with another scale and with other scores of importance."""

import math
from dataclasses import replace

import pytest
import torch

from fedrts import config
from fedrts.errors import InputError
from fedrts.methods import FedRTS
from fedrts.server import rounds
from fedrts.sparse import importance, posterior
from helping import ask
from plain import Plain, largest, spans

SKEWED = {"partition": "dirichlet", "alpha": 1.0, "min_size": 3}


@pytest.mark.parametrize("dropout", [0.0, 0.45])
@pytest.mark.parametrize("method", ["fedrts", "fedrts_gamma0", "fedrts_gamma1"])
def test_a_scale_of_clients_is_the_number_of_replies_that_counted(toy, method, dropout):
    run = toy(method, "cnn", clients={**SKEWED, "dropout": dropout}, method_options={"scale": "clients"}, rounds=7)
    state, numbers = run.method.begin(run.setup), set()
    for index in range(6):
        played = rounds.play_round(run.plan, state, index)
        number = len(played.record.clients)
        numbers.add(number)
        fixed = replace(run.plan, method=run.method.model_copy(update={"scale": float(number)}))
        same = rounds.play_round(fixed, state, index).state
        other = rounds.play_round(replace(run.plan, method=run.method.model_copy(update={"scale": 10.0})), state, index).state
        assert torch.equal(played.state.weights, same.weights)
        assert played.state.mask == same.mask
        assert all(torch.equal(played.state[name], same[name]) for name in ("alpha", "beta"))
        assert not torch.equal(played.state["alpha"], other["alpha"])
        observed = (played.state["alpha"] + played.state["beta"]) - (state["alpha"] + state["beta"])
        seen = torch.ones_like(observed, dtype=torch.bool) if played.record.outer else state.mask.bits
        torch.testing.assert_close(observed, number * seen.float(), rtol=0, atol=1e-4)
        state = played.state
    assert numbers == {3} if dropout == 0 else len(numbers) > 1


def test_scales_that_are_none():
    for scale in ("client", -1.0, 0.0, math.inf):
        with pytest.raises(InputError, match=r"method_options\.scale") as caught:
            config.resolve({"method": "fedrts", "method_options": {"scale": scale}})
        assert "\n" not in str(caught.value)


# -- scores ----------------------------------------------------------------------------------------------------------


def posterior_by_hand(run, plain, state, index, score):
    """α and β after a round in which links are ranked by `score(weights, squares)`, with γ = ½ and λ = 10."""
    clients, epochs = run.plan.sample(index), run.training.epochs
    model, masks = plain.model(state.weights), plain.masks(state.mask)
    trained = {client: plain.train(model, masks, client, index, range(epochs)) for client in clients}
    weights = {client: plain.over_links(model).double() for client, (model, _) in trained.items()}
    squares = {client: plain.over_links(squares).double() for client, (_, squares) in trained.items()}
    everyone = score(plain.mean(weights), plain.mean(squares))
    total = sum(plain.samples(client) for client in clients)
    alpha, beta = state["alpha"].double().clone(), state["beta"].double().clone()
    current = run.plan.round(index, state.mask)
    for layer, q in zip(spans(run.layout.sizes), current.quota, strict=True):
        active = [i for i in layer if state.mask.bits[i]]
        inactive = [i for i in layer if not state.mask.bits[i]]
        core = largest({i: float(everyone[i]) for i in active}, len(active) - q)
        outcome = {i: 0.5 * (i in core) for i in active}
        if current.outer:
            outcome |= dict.fromkeys(inactive, 0.25)
        for client in clients:
            share = plain.samples(client) / total
            own = score(weights[client], squares[client])
            for i in largest({i: float(own[i]) for i in active}, len(active) - q):
                outcome[i] += 0.5 * share
            if current.outer:
                batch = plain.batches(client, index, epochs)[:1]
                gradient = plain.over_links(plain.gradient(trained[client][0], batch)).abs()
                for i in largest({i: float(gradient[i]) for i in inactive}, q):
                    outcome[i] += 0.5 * share
        for i, x in outcome.items():
            alpha[i] += 10 * x
            beta[i] += 10 * (1 - x)
    return alpha, beta, squares


@pytest.mark.parametrize("method", ["fedrts", "fedcucb"])
@pytest.mark.parametrize("outer", [True, False])
def test_fisher_information_by_hand(toy, outer, method):
    """w²·mean g², of every client and of the aggregate; the squares of active links travel with the weights."""
    index = 3 if outer else 2
    run = toy(method, "cnn", clients=SKEWED, train={"epochs": 2}, method_options={"score": "fisher"})
    plain_score = toy(method, "cnn", clients=SKEWED, train={"epochs": 2})
    plain, state = Plain(run), run.method.begin(run.setup)
    assert run.plan.round(index, state.mask).outer == outer
    played, without = (rounds.play_round(r.plan, state, index) for r in (run, plain_score))
    prior = state if method == "fedrts" else state.remember(alpha=torch.ones(run.layout.links), beta=torch.ones(run.layout.links))
    alpha, beta, squares = posterior_by_hand(run, plain, prior, index, lambda w, s: w * w * s)
    if method == "fedrts":
        torch.testing.assert_close(played.state["alpha"].double(), alpha, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(played.state["beta"].double(), beta, rtol=1e-5, atol=1e-4)
        assert not torch.equal(played.state["alpha"], without.state["alpha"]), "another ranking than by magnitude"
    else:
        torch.testing.assert_close(played.state["mean"].double() * played.state["tried"], (alpha - 1) / 10, rtol=1e-5, atol=1e-5)
    if outer and method == "fedrts":
        drawn = posterior.draw(played.state["alpha"], played.state["beta"], run.plan.key(index, "topology")).tolist()
        layers = zip(spans(run.layout.sizes), state.mask.counts, strict=True)
        assert set(played.state.mask.active.tolist()) == set().union(*(largest({i: drawn[i] for i in layer}, k) for layer, k in layers))

    (exchange,) = run.method.exchanges(run.plan.round(index, state.mask))
    for reply in ask(run, exchange, state, index, run.plan.sample(index)):
        assert set(reply.message) == {"weights", "squares"} | ({"votes"} if outer else set())
        expected = squares[reply.client][state.mask.bits].float()
        torch.testing.assert_close(reply.message["squares"], expected, rtol=1e-3, atol=1e-8)
    extra = played.record.upload_bytes - without.record.upload_bytes
    assert extra == 3 * 4 * state.mask.number, "four bytes for every active link of three clients"
    assert played.record.download_bytes == without.record.download_bytes


def test_squares_stop_when_the_posterior_rests(toy):
    run = toy("fedrts", method_options={"score": "fisher"})
    state = run.method.begin(run.setup)
    assert set(run.method.exchanges(run.plan.round(6, state.mask))[0].up) == {"weights"}
    goes_on = toy("fedrts", method_options={"score": "fisher", "update_after_end": True})
    assert set(goes_on.method.exchanges(goes_on.plan.round(6, state.mask))[0].up) == {"weights", "squares"}


OWN = """
def smallest(weights):
    return -weights.abs()

def noisy(weights, squares):
    return squares

def shifted(weights, *, by=1.0):
    return (weights + by).abs()

class Scaled:
    def __call__(self, weights):
        return weights.abs()

scaled = Scaled()
number = 3
"""


@pytest.fixture
def own_scores(tmp_path, monkeypatch):
    (tmp_path / "own_scores.py").write_text(OWN, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "formula", "fields"),
    [
        ("own_scores:smallest", lambda w, s: -w.abs(), {"weights"}),
        ("own_scores:noisy", lambda w, s: s, {"weights", "squares"}),
        ("own_scores:scaled", lambda w, s: w.abs(), {"weights"}),
        ("torch:abs", lambda w, s: w.abs(), {"weights"}),
    ],
)
def test_ones_own_score_by_import_path(toy, own_scores, name, formula, fields):
    run = toy("fedrts", "cnn", clients=SKEWED, method_options={"score": name})
    state = run.method.begin(run.setup)
    assert set(run.method.exchanges(run.plan.round(2, state.mask))[0].up) == fields
    after = rounds.play_round(run.plan, state, 2).state
    alpha, beta, _ = posterior_by_hand(run, Plain(run), state, 2, formula)
    torch.testing.assert_close(after["alpha"].double(), alpha, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(after["beta"].double(), beta, rtol=1e-5, atol=1e-4)


def test_a_score_with_settings_of_its_own_needs_no_squares(own_scores):
    assert not importance.needs_squares(importance.get("own_scores:shifted"))
    assert importance.needs_squares(importance.get("own_scores:noisy"))
    assert importance.needs_squares(importance.fisher)
    assert not importance.needs_squares(importance.magnitude)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("fishr", ["no score 'fishr'", "did you mean 'fisher'"]),
        ("magnitud", ["did you mean 'magnitude'"]),
        ("zzz", ["known: fisher, magnitude", "import path"]),
        ("own_scores:nothing", ["cannot import", "own_scores:nothing"]),
        ("own_scores:number", ["own_scores:number", "must be a function"]),
        ("no_such_module:score", ["cannot import", "no_such_module"]),
    ],
)
def test_scores_that_are_none(own_scores, score, words):
    with pytest.raises(InputError) as caught:
        config.resolve({"method": "fedrts", "method_options": {"score": score}})
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(ValueError, match="score"):
        FedRTS(score=score)
