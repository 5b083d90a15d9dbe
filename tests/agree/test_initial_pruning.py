"""SNIP, GraSP and SynFlow: masks chosen once, against plain loops, explicit Hessians and products of matrices."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import fedrts
from fedrts import models
from fedrts.client.envelope import encode_reply
from fedrts.client.privacy import Repeatable
from fedrts.methods import SNIP, GraSP, SynFlow
from fedrts.methods.contract import Means, Setup, State
from fedrts.methods.snip import sensitivity
from fedrts.runs.build import put_together
from fedrts.server import rounds
from fedrts.sparse import budget, random
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from helping import ask, order_of, round_of
from plain import Plain, bits_of, largest, spans

SKEWED = {"partition": "dirichlet", "alpha": 1.0, "min_size": 3}
"""Clients of different sizes, some with less than a batch."""


def set_up(run):
    """The state before round 0, and the record of the set-up."""
    played = rounds.play_round(run.plan, run.method.begin(run.setup), -1)
    return played.state, played.record


def full_epoch(plain, client):
    """The batches of the set-up: those of the epoch after the last."""
    return plain.batches(client, -1, plain.run.training.epochs)


def in_double(run):
    """The same run in float64."""
    held = replace(run.data, x=run.data.x.double() if run.data.x.is_floating_point() else run.data.x)
    return put_together(run.experiment, copy.deepcopy(run.module).double(), held, run.rows, noise=Repeatable)


# -- SNIP ------------------------------------------------------------------------------------------------------------


def snip_scores(run):
    """|W_0 · Σ p_k g_k| by hand."""
    plain = Plain(run)
    model = plain.model(run.setup.weights)
    clients = run.plan.sample(0)
    assert len({plain.samples(client) for client in clients}) > 1, "different p_k"
    gradients = {client: plain.over_links(plain.gradient(model, full_epoch(plain, client))) for client in clients}
    return (run.setup.weights[: run.layout.links].double() * plain.mean(gradients)).abs()


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("scope", ["global", "erk"])
def test_snip_keeps_the_links_of_largest_sensitivity(toy, model, scope):
    run = toy("snip", model, clients=SKEWED, density=0.3, method_options={"scope": scope})
    scores = snip_scores(run).tolist()
    counts = run.setup.counts(0.3)
    if scope == "global":
        expected = largest(dict(enumerate(scores)), sum(counts))
    else:
        layers = zip(spans(run.layout.sizes), counts, strict=True)
        expected = set().union(*(largest({i: scores[i] for i in layer}, k) for layer, k in layers))
    state, record = set_up(run)
    assert set(state.mask.active.tolist()) == expected
    assert sum(state.mask.counts) == budget.links_to_keep(run.layout, 0.3)
    assert (state.mask.counts == tuple(counts)) == (scope == "erk")
    assert torch.equal(state.weights, state.mask.expand(state.mask.compact(run.setup.weights))), "W_0 on the mask, statistics untouched"
    assert state.memory == {}
    assert (record.round, record.outer, record.accuracy) == (-1, False, None)
    assert record.clients == run.plan.sample(0)


def test_the_gradient_of_the_set_up_is_the_mean_over_all_full_batches_and_leaves_batchnorm_alone(toy):
    run = toy("snip", "cnn", clients=SKEWED)
    plain, state = Plain(run), run.method.begin(run.setup)
    (exchange,) = run.method.exchanges(run.plan.round(-1, state.mask))
    before = state.weights.clone()
    sizes = {plain.samples(client) for client in range(5)}
    assert any(size % 8 for size in sizes), "an incomplete last batch is left out"
    for reply in ask(run, exchange, state, -1, range(5)):
        gradient = plain.gradient(plain.model(before), full_epoch(plain, reply.client))
        torch.testing.assert_close(reply.message["gradient"], plain.over_links(gradient), rtol=1e-4, atol=1e-7)
        buffers = torch.cat([buffer.flatten() for name, buffer in run.module.named_buffers() if "running" in name])
        assert torch.equal(buffers, before[run.layout.parameters :])
    assert torch.equal(state.weights, before)


@given(st.data())
def test_links_without_weight_or_gradient_have_no_sensitivity_and_go_first(data):
    number = st.sampled_from([0.0, 1.0, -2.0]) | st.floats(-3, 3, width=32)
    weights, gradient = (torch.tensor(data.draw(st.lists(number, min_size=8, max_size=8))) for _ in range(2))
    scores = sensitivity(weights, gradient)
    nothing = (weights == 0) | (gradient == 0)
    assert bool((scores[nothing] == 0).all())
    assert scores.tolist() == pytest.approx([abs(float(w) * float(g)) for w, g in zip(weights, gradient, strict=True)], rel=1e-6)
    kept = data.draw(st.integers(1, 8))
    state = State(weights.clone(), Mask.full([4, 4])).remember(budget=torch.tensor([1, kept - 1]))
    after = SNIP(density=0.5).pruned(state, scores)
    assert after.mask.number == kept
    assert set(after.mask.active.tolist()) == largest(dict(enumerate(scores.tolist())), kept)
    if kept <= int((scores > 0).sum()):
        assert not bool((after.mask.bits & nothing).any())


@pytest.mark.parametrize("method", ["snip", "grasp", "synflow"])
@pytest.mark.parametrize("model", ["cnn", "tiny_gpt"])
def test_afterwards_it_is_averaging_on_a_mask_that_never_changes(toy, method, model):
    run, random_mask = toy(method, model), toy("random", model)
    state = run.method.begin(run.setup)
    if run.method.exchanges(run.plan.round(-1, state.mask)):
        state, _ = set_up(run)
    chosen, reference = state.mask, State.of(run.setup.weights, state.mask)
    assert chosen != random_mask.method.begin(random_mask.setup).mask
    for index in range(3):
        state = rounds.play_round(run.plan, state, index).state
        reference = rounds.play_round(random_mask.plan, reference, index).state
        assert torch.equal(state.weights, reference.weights)
        assert state.mask == chosen
    assert set(state.memory) == set()


@pytest.mark.parametrize(("method", "exchanges"), [("snip", 1), ("grasp", 2)])
def test_the_set_up_is_a_line_of_history_and_its_bytes_count(toy, method, exchanges, tmp_path):
    run = toy(method, "mlp")
    keywords = run.experiment.model_dump()
    result = fedrts.run(**{**keywords, "out": str(tmp_path / "run")})
    line = result.history[0]
    assert [line["round"] for line in result.history] == [-1, *range(7)]
    assert (line["outer"], line["accuracy"], line["links_changed"]) == (False, None, 0.0)
    state, up = run.method.begin(run.setup), 0
    for number, exchange in enumerate(run.method.exchanges(run.plan.round(-1, state.mask))):
        order = order_of(run, exchange, state, -1, number)
        replies = list(run.plan.engine.run(order, line["clients"]))
        up += sum(len(encode_reply(reply, order)) for reply in replies)
        sums = {name: torch.zeros_like(payload) for name, payload in replies[0].message.items()}
        state = run.method.update(state, Means(sums), order.round, lambda purpose: 0)
    assert line["upload_bytes"] == up
    assert up > 3 * exchanges * 4 * run.layout.links, "dense gradients of three clients"
    assert line["download_bytes"] > 3 * exchanges * 4 * run.layout.parameters, "dense weights to three clients"
    for total in ("upload_bytes", "download_bytes"):
        assert result.summary[total] == sum(entry[total] for entry in result.history)
    assert (tmp_path / "run" / "history.jsonl").read_text("utf-8").count("\n") == 8


# -- GraSP -----------------------------------------------------------------------------------------------------------


def test_grasp_against_explicit_hessians(toy):
    """Σ p_k H_k ḡ with every H_k written out, in float64; ḡ first, then the products."""
    run = in_double(toy("grasp", "mlp", clients=SKEWED, density=0.4, model_options={"hidden": [3, 3]}))
    plain, clients = Plain(run), run.plan.sample(0)
    model = plain.model(run.setup.weights)
    layers = run.layout.layers

    def loss(links, rows):
        named = {entry.name: part.view(entry.shape) for entry, part in zip(layers, links.split(list(run.layout.sizes)), strict=True)}
        output = functional_call(plain.module, {**model, **named}, run.data.x[rows])
        return torch.nn.functional.cross_entropy(output / 200.0, run.data.y[rows])

    at = run.setup.weights[: run.layout.links]
    own, hessians = {}, {}
    for client in clients:
        batches = full_epoch(plain, client)
        hessians[client] = sum(torch.autograd.functional.hessian(lambda w, r=rows: loss(w, r), at) for rows in batches) / len(batches)
        own[client] = plain.over_links(plain.gradient(model, batches, temperature=200.0))
    mean = plain.mean(own)
    product = plain.mean({client: hessians[client] @ mean for client in clients})
    expected = largest(dict(enumerate((at * product).tolist())), budget.links_to_keep(run.layout, 0.4))
    other = plain.mean({client: hessians[client] @ own[client] for client in clients})
    assert expected != largest(dict(enumerate((at * other).tolist())), len(expected)), "the order of the means matters here"

    begun = run.method.begin(run.setup)
    first, second = run.method.exchanges(run.plan.round(-1, begun.mask))
    for reply in ask(run, first, begun, -1, clients):
        torch.testing.assert_close(reply.message["gradient"], own[reply.client])
    for reply in ask(run, second, begun.remember(gradient=mean), -1, clients):
        torch.testing.assert_close(reply.message["curvature"], hessians[reply.client] @ mean, rtol=1e-7, atol=1e-15)
    state, _ = set_up(run)
    assert set(state.mask.active.tolist()) == expected
    assert state.memory == {}


@pytest.mark.parametrize("model", ["cnn", "tiny_gpt"])
def test_products_with_the_hessian_are_differences_of_gradients(toy, model):
    """BatchNorm in training mode, and attention, whose fused kernels cannot be differentiated twice."""
    run = in_double(toy("grasp", model))
    plain, state = Plain(run), run.method.begin(run.setup)
    along = 2 * random.uniform(7, run.layout.links).double() - 1
    second = run.method.exchanges(run.plan.round(-1, state.mask))[1]
    for reply in ask(run, second, state.remember(gradient=along), -1, [0, 3]):
        sides = []
        for side in (1e-6, -1e-6):
            moved = run.setup.weights.clone()
            moved[: run.layout.links] += side * along
            sides.append(plain.over_links(plain.gradient(plain.model(moved), full_epoch(plain, reply.client), temperature=200.0)))
        difference = (sides[0] - sides[1]) / 2e-6
        torch.testing.assert_close(reply.message["curvature"], difference, rtol=1e-4, atol=1e-6 * float(difference.abs().max()))
    buffers = torch.cat([torch.zeros(0), *[b.flatten() for name, b in run.module.named_buffers() if "running" in name]])
    assert torch.equal(buffers, run.setup.weights[run.layout.parameters :]), "statistics are untouched"


def test_parameters_that_take_no_part_do_not_stop_grasp(toy):
    """One frozen, one that the model does not use: their products are 0."""
    base = toy("grasp", "mlp")
    module = copy.deepcopy(base.module)
    module[1].weight.requires_grad_(False)
    module.spare = nn.Linear(4, 3)
    module.forward = lambda x, parts=list(module)[:-1]: nn.Sequential(*parts)(x)
    run = put_together(base.experiment, module, base.data, base.rows, prunable=lambda name, _: name.endswith("weight"), noise=Repeatable)
    state, _ = set_up(run)
    assert state.mask.number == budget.links_to_keep(run.layout, 0.5)


def test_grasp_keeps_the_largest_products_and_its_scope_may_be_a_layer():
    state = State(torch.tensor([1.0, -1.0, 2.0, 1.0, 5.0]), Mask.full([2, 2])).remember(budget=torch.tensor([1, 1]), gradient=torch.ones(4))
    second = replace(round_of(-1, Schedule(), state.mask), exchange=1)
    chosen = {}
    for scope in ("global", "erk"):
        for name, curvature in (("signed", [3.0, 9.0, 4.0, 2.0]), ("crowded", [9.0, -9.0, 1.0, 1.0])):  # w·Hg: 3 −9 8 2, and 9 9 2 1
            after = GraSP(density=0.5, scope=scope).update(state, Means({"curvature": torch.tensor(curvature)}), second, lambda purpose: 0)
            chosen[scope, name] = set(after.mask.active.tolist())
    assert chosen == {
        ("global", "signed"): {0, 2},
        ("erk", "signed"): {0, 2},
        ("global", "crowded"): {0, 1},
        ("erk", "crowded"): {0, 2},
    }


# -- SynFlow ---------------------------------------------------------------------------------------------------------


def synflow_mask(module, input_shape, density, iterations=100, count="prunable", weights=None):
    layout = Layout.of(module)
    weights = layout.flatten(module.state_dict()) if weights is None else weights
    setup = Setup(layout, weights, input_shape, rng=lambda purpose: random.key(purpose), module=module, budget=count)
    return SynFlow(density=density, iterations=iterations).initial_mask(setup)


def mlp(hidden, inputs=5, seed=0):
    torch.manual_seed(seed)
    return models.get("mlp")((inputs,), 3, hidden=hidden)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 7), min_size=1, max_size=3), st.sampled_from([1, 2, 5, 17]), st.floats(0.05, 1.0), st.integers(0, 10**6))
def test_synflow_by_products_of_matrices(hidden, iterations, density, seed):
    """Activations forwards, what each contributes to R backwards; the flow of a link is its weight between the two."""
    module = mlp(hidden, seed=seed)
    layout = Layout.of(module)
    try:
        kept = budget.links_to_keep(layout, density, "prunable")
    except ValueError:
        kept, density = len(layout.layers), 1.0001 * len(layout.layers) / layout.links
        kept = budget.links_to_keep(layout, density, "prunable")
    linear = [part for part in module if isinstance(part, nn.Linear)]
    bits = torch.ones(layout.links, dtype=torch.bool)
    for k in range(1, iterations + 1):
        masks = [part.view(entry.shape) for entry, part in zip(layout.layers, bits.split(list(layout.sizes)), strict=True)]
        magnitudes = [part.weight.detach().double().abs() for part in linear]
        magnitudes = [w * m for w, m in zip(magnitudes, [*masks, torch.ones(1)], strict=True)]
        above = [torch.ones(5, dtype=torch.float64)]
        for w in magnitudes:
            above.append(w @ above[-1])  # positive: ReLU changes nothing; biases count as 0
        below = [torch.ones(3, dtype=torch.float64)]
        for w in magnitudes[:0:-1]:
            below.insert(0, w.t() @ below[0])
        flow = torch.cat(
            [(w * torch.outer(b, a)).flatten() for w, a, b in zip(magnitudes, above, below, strict=False)][: len(layout.layers)]
        )
        stay = round(layout.links * (kept / layout.links) ** (k / iterations))
        bits = bits_of(largest({i: float(flow[i]) for i in range(layout.links) if bits[i]}, stay), layout.links)
    found = synflow_mask(module, (5,), density, iterations)
    assert found.number == kept
    assert torch.equal(found.bits, bits)


def test_one_round_of_pruning_is_not_a_hundred():
    module = mlp([7, 6])
    masks = [synflow_mask(module, (5,), 0.15, iterations).bits for iterations in (1, 100)]
    assert not torch.equal(*masks)


@pytest.mark.parametrize("model", ["mlp", "cnn", "tiny_gpt"])
def test_synflow_looks_at_magnitudes_only_and_changes_nothing(toy, model):
    run = toy("synflow", model)
    before = {name: tensor.clone() for name, tensor in run.module.state_dict().items()}
    identities = [id(parameter) for parameter in run.module.parameters()]
    run.module.train()
    mask = run.method.begin(run.setup).mask
    assert mask.number == budget.links_to_keep(run.layout, 0.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.module.state_dict().items())
    assert [id(parameter) for parameter in run.module.parameters()] == identities
    assert all(part.training and not part._forward_hooks for part in run.module.modules())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.module.parameters())

    signs = torch.where(random.uniform(3, run.layout.links) < 0.5, -1.0, 1.0)
    flipped = run.setup.weights.clone()
    flipped[: run.layout.links] *= signs
    assert run.method.begin(replace(run.setup, weights=flipped)).mask == mask
    other = flipped.clone()
    other[: run.layout.links] = other[: run.layout.links].roll(7)
    assert run.method.begin(replace(run.setup, weights=other)).mask != mask, "it does look at the magnitudes"


def test_synflow_sees_no_data(toy):
    run = toy("synflow", "cnn")
    rows = [part.flip(0) for part in reversed(run.rows)]
    other = put_together(run.experiment, copy.deepcopy(run.module), replace(run.data, x=5 * run.data.x.flip(0) - 1), rows, noise=Repeatable)
    assert run.method.exchanges(run.plan.round(-1, Mask.full(run.layout.sizes))) == ()
    assert run.method.begin(run.setup).mask == other.method.begin(other.setup).mask


class Scale(nn.Module):
    """What a normalisation layer does to a signal that it does not normalise."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale.detach().double()

    def forward(self, x):
        return x * self.scale.abs()


NORMS = {
    "BatchNorm": lambda: nn.BatchNorm2d(6, eps=0.0),
    "BatchNorm without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "InstanceNorm": lambda: nn.InstanceNorm2d(6, affine=True),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True, eps=0.0),
    "LayerNorm over features": lambda: nn.LayerNorm(4),
    "LayerNorm over images": lambda: nn.LayerNorm([6, 4, 4]),
    "RMSNorm": lambda: nn.RMSNorm([4, 4]),
}


@pytest.mark.parametrize("kind", NORMS)
def test_normalisation_scales_but_does_not_normalise(kind):
    """A constant signal would vanish; the mask is that of a network with the scale alone."""
    torch.manual_seed(5)
    norm = NORMS[kind]()
    for tensor in (*norm.parameters(), *(buffer for name, buffer in norm.named_buffers() if name == "running_mean")):
        nn.init.uniform_(tensor, -2, 2)
    weight = norm.get_parameter("weight")
    channels = (1, -1, 1, 1) if weight.numel() == 6 else weight.shape
    plain = Scale(weight.view(channels))
    first, second, last = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3), nn.Linear(24, 3)

    def network(between):
        return nn.Sequential(first, between, nn.ReLU(), second, nn.Flatten(), last)

    masks = [synflow_mask(network(between), (2, 4, 4), 0.2, 20) for between in (norm, plain)]
    assert masks[0].counts == masks[1].counts
    assert torch.equal(masks[0].bits, masks[1].bits)
    assert min(masks[0].counts) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_get_their_budget_and_no_other_layer_is_cut_through(toy, tied):
    run = toy("synflow", "tiny_gpt", density=0.2 if tied else 0.3, model_options={"width": 16, "layers": 2, "heads": 2})
    module = copy.deepcopy(run.module)
    if not tied:
        module.lm_head.weight = nn.Parameter(0.02 * torch.randn_like(module.lm_head.weight))
        run = put_together(run.experiment, module, run.data, run.rows, noise=Repeatable)
    mask, counts = run.method.begin(run.setup).mask, run.setup.counts(run.experiment.density)
    assert mask.number == sum(counts)
    names = [entry.names for entry in run.layout.layers]
    assert sum("wte" in of[0] or "wpe" in of[0] for of in names) == 2
    for layer, of in enumerate(names):
        if "wte" in of[0] or "wpe" in of[0]:
            assert mask.counts[layer] == counts[layer]
        else:
            assert mask.counts[layer] > 0, of
    assert any(found != wanted for found, wanted in zip(mask.counts, counts, strict=True)), "the others are ranked together"


def test_no_layer_of_a_deep_network_with_biases_collapses():
    module = mlp([64] * 7, inputs=64)
    assert min(synflow_mask(module, (64,), 0.005).counts) > 0


def test_a_frozen_layer_has_flow_too():
    module = mlp([7, 6])
    expected = synflow_mask(module, (5,), 0.3)
    layout = Layout.of(module)
    module[1].requires_grad_(False)
    setup = Setup(
        layout, layout.flatten(module.state_dict()), (5,), rng=lambda purpose: random.key(purpose), module=module, budget="prunable"
    )
    assert SynFlow(density=0.3).initial_mask(setup) == expected


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_no_layer_of_a_small_resnet_collapses(norm):
    torch.manual_seed(0)
    module = models.get("resnet18_small")((3, 16, 16), 10, norm=norm)
    layout = Layout.of(module)
    mask = synflow_mask(module, (3, 16, 16), 0.01, iterations=25)
    assert mask.number == int(0.01 * layout.links)
    assert min(mask.counts) > 0
    assert carries_signal(module, mask)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_layer_of_resnet18_collapses():
    torch.manual_seed(0)
    module = models.get("resnet18")((3, 32, 32), 10)
    layout = Layout.of(module)
    mask = synflow_mask(module, (3, 32, 32), 0.01, count="all")
    assert mask.number == budget.links_to_keep(layout, 0.01)
    assert min(mask.counts) > 0
    assert carries_signal(module, mask)


def carries_signal(module, mask):
    """Does the pruned network's output depend on its input?"""
    layout = Layout.of(module)
    pruned = copy.deepcopy(module)
    weights = layout.flatten(module.state_dict())
    pruned.load_state_dict(layout.state_dict(mask.expand(mask.compact(weights))))
    images = torch.randn(2, 3, 16, 16)
    pruned.eval()
    return float((pruned(images)[0] - pruned(images)[1]).abs().max().detach()) > 0
