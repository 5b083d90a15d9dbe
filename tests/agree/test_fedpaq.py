"""FedPAQ against its equations: the quantiser over channels and tensors, three rounds by hand, and what its messages are long."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import byhand
import fedrts
from fedrts.client.order import Order
from fedrts.methods import FedPAQ
from fedrts.methods.contract import Exchange, Round, Setup
from fedrts.server import rounds
from fedrts.sparse import random
from fedrts.sparse.cost import Book
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.sparse.schedule import Schedule
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.fields import Frame, Payload, Short, Values
from fedrts.wire.quantise import Norm, Quantised

NORMS: tuple[Norm, ...] = ("linf", "l2")
GRAINS = ("channel", "tensor")


def scale_of(values, norm):
    """Return the scale of one group, in float64."""
    return max(map(abs, values)) if norm == "linf" else math.sqrt(math.fsum(v * v for v in values))


def cut(values, groups):
    start = 0
    for length in groups:
        yield values[start : start + length]
        start += length


# -- the quantiser --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("groups", [(40,), (7, 13, 20), (1,) * 5 + (35,)])
def test_rounding_is_right_on_average(norm, groups):
    """Over K keys the mean error of a value has a variance of unit²·f(1 − f)/K, f being how far it is between two levels."""
    keys = 1500
    values = torch.randn(40, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 40)
    exact = values.double().tolist()
    unit = torch.tensor([scale_of(part, norm) / 127 for part in cut(exact, groups) for _ in part], dtype=torch.float64)
    drawn = torch.stack([Quantised.of(values, 1_000_003 * key + 17, groups, norm).values().double() for key in range(keys)])
    part = (values.double() / unit) % 1
    deviation = unit * (part * (1 - part)).sqrt()
    certain = deviation < 0.01 * unit  # all but on a level
    z = (drawn.mean(0) - values.double())[~certain] / deviation[~certain] * math.sqrt(keys)
    assert z.abs().max() < 5
    assert abs(float(z.mean())) * math.sqrt(len(z)) < 5, "nor is there a bias that all share"
    assert ((drawn.mean(0) - values.double()).abs()[certain] <= 0.02 * unit[certain]).all()
    levels = drawn / unit
    assert (levels.amax(0) - levels.amin(0) < 1.01).all(), "the two neighbours, and no others"
    assert ((levels.amax(0) - levels.amin(0))[part * (1 - part) > 0.05] > 0.99).all(), "and both of them"


@st.composite
def groups_of_values(draw):
    groups = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    number = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, -1e25]) | st.floats(-1e3, 1e3, width=32)
    return groups, draw(st.lists(number, min_size=sum(groups), max_size=sum(groups)))


@given(groups_of_values(), st.sampled_from(NORMS), st.integers(0, 2**64 - 1))
def test_the_error_is_at_most_one_level(case, norm, key):
    groups, numbers = case
    values = torch.tensor(numbers, dtype=torch.float32)
    quantised = Quantised.of(values, key, groups, norm)
    restored = quantised.values()
    assert quantised.levels.dtype == torch.int8
    assert quantised.scales.shape == (len(groups),)
    assert torch.isfinite(quantised.scales).all()
    assert int(quantised.levels.abs().max()) <= 127
    for part, found, scale in zip(cut(values.double().tolist(), groups), cut(restored.tolist(), groups), quantised.scales, strict=True):
        expected = scale_of(part, norm)
        assert float(scale) == pytest.approx(expected, rel=1e-5, abs=1e-44)
        for x, q in zip(part, found, strict=True):
            assert abs(q - x) <= expected / 127 * (1 + 1e-4) + 1e-43
            assert q * x >= 0, "no sign changes"
            assert x != 0 or q == 0


@pytest.mark.parametrize("norm", NORMS)
def test_zeros_stay_zero(norm):
    quantised = Quantised.of(torch.zeros(12), 5, (4, 8), norm)
    assert quantised.values().tolist() == [0.0] * 12
    assert quantised.scales.tolist() == [0.0, 0.0]
    mixed = Quantised.of(torch.tensor([0.0, 0.0, 1.0, -2.0]), 5, (2, 2), norm)
    assert mixed.values()[:2].tolist() == [0.0, 0.0]


def quantised(payload: Payload) -> Quantised:
    """The levels and scales of a payload in int8."""
    assert isinstance(payload, Short)
    assert isinstance(payload.values, Quantised)
    return payload.values


def test_groups_are_channels_of_matrices_and_kernels_and_whole_vectors():
    layout = Layout((Entry(("c",), (2, 3, 1, 1)), Entry(("w",), (3, 4))), (Entry(("b",), (5,)),), (Entry(("mean",), (7,)),))
    frame, values = Frame(layout, Mask.full(layout.sizes)), torch.arange(1.0, 31.0)
    for norm in NORMS:
        by_channel = quantised(Values(type="int8", scales="channel", norm=norm).take({"weights": values}, frame)).scales
        by_tensor = quantised(Values(type="int8", scales="tensor", norm=norm).take({"weights": values}, frame)).scales
        exact = values.tolist()
        assert by_channel.tolist() == pytest.approx([scale_of(part, norm) for part in cut(exact, (3, 3, 4, 4, 4, 5))])
        assert by_tensor.tolist() == pytest.approx([scale_of(part, norm) for part in cut(exact, (6, 12, 5))])
    pruned = Frame(layout, Mask.top(values[:18], [3, 6], layout.sizes))
    with pytest.raises(ValueError, match="not pruned"):
        Values(type="int8", scales="channel").take({"weights": values}, pruned)


def test_an_uploaded_change_is_right_on_average_too():
    """Through the field, with a reference: what the server opens is W_received + Q(D), and E[Q(D)] = D."""
    layout = Layout((Entry(("w",), (4, 6)),), (Entry(("b",), (4,)),), (Entry(("mean",), (3,)),))
    generator = torch.Generator().manual_seed(0)
    reference, change = torch.randn(31, generator=generator), 0.01 * torch.randn(31, generator=generator)
    field, keys = Values(type="int8", scales="channel"), 800
    opened = []
    for key in range(keys):
        frame = Frame(layout, Mask.full(layout.sizes), key=random.key("test", key), reference=reference)
        opened.append(field.open(field.take({"weights": reference + change}, frame), frame).double())
    found = torch.stack(opened)
    assert (found[:, 28:] == (reference + change)[28:]).all(), "statistics travel whole"
    unit = torch.tensor([scale_of(part, "linf") / 127 for part in cut(change[:28].tolist(), (6, 6, 6, 6, 4)) for _ in part])
    error = found.mean(0)[:28] - (reference + change)[:28].double()
    assert (error.abs() <= 5 * 0.5 * unit / math.sqrt(keys) + 1e-7).all()
    assert ((found - found[0]).abs().amax(0)[:28] > 0).sum() > 20, "the rounding is random"


# -- three rounds by hand -------------------------------------------------------------------------------------------------


def channels(layout, grain):
    """Lengths of the groups that share a scale, over all parameters."""
    for entry in layout.parameter_entries:
        rows = entry.shape[0] if grain == "channel" and len(entry.shape) > 1 else 1
        yield from [entry.size // rows] * rows


def restored_by_hand(short, exact, groups, norm):
    """level · scale / 127 of a payload, each level being one of the two neighbours of 127·x/scale."""
    result = []
    levels, scales = short.values.levels.tolist(), short.values.scales.tolist()
    for scale, part, mine in zip(scales, cut(exact, groups), cut(levels, groups), strict=True):
        assert scale == pytest.approx(scale_of(part, norm), rel=1e-5)
        for x, level in zip(part, mine, strict=True):
            where = 127 * x / scale if scale else 0.0
            assert math.floor(where - 1e-4) <= level <= math.ceil(where + 1e-4)
            result.append(level * scale / 127)
    return result


@pytest.mark.parametrize(
    ("norm", "grain", "downlink"),
    [("linf", "channel", "int8"), ("l2", "tensor", "int8"), ("linf", "tensor", "float32"), ("l2", "channel", "float32")],
)
def test_rounds_by_hand(toy, norm, grain, downlink):
    """W ← W + Σ p_k Q(W^n − W_received): clients see W in 8 bits, the server keeps it whole."""
    options = {"norm": norm, "granularity": grain, "downlink": downlink}
    run = toy("fedpaq", "cnn", method_options=options, clients=byhand.UNEQUAL)
    state, count, groups = run.method.begin(run.setup), run.layout.parameters, list(channels(run.layout, grain))
    for index in range(3):
        (exchange,) = run.plan.exchanges(run.plan.round(index, state.mask))
        key = run.plan.key(index, "rounding 0")
        extended = Exchange(exchange.down, exchange.steps, {**exchange.up, "trained": Values(on="all")})
        order = Order.of(extended, run.plan.round(index, state.mask), run.layout, state, key)
        if downlink == "int8":
            received = restored_by_hand(order.sent["weights"], state.weights[:count].tolist(), groups, norm)
            sent = order.sent["weights"]
            assert isinstance(sent, Short)
            received += sent.statistics.tolist()
            assert received[count:] == state.weights[count:].tolist()
        else:
            received = state.weights.tolist()
            sent = order.sent["weights"]
            assert isinstance(sent, torch.Tensor)
            assert torch.equal(sent, state.weights)
        clients = run.plan.sample(index)
        samples, changes, statistics = [len(run.rows[client]) for client in clients], [], []
        assert len(set(samples)) > 1
        for reply in run.plan.engine.run(order, clients):
            trained = reply.message["trained"].tolist()
            moved = [a - b for a, b in zip(trained[:count], received[:count], strict=True)]
            changes.append(restored_by_hand_of(reply.message["weights"], moved, groups, norm))
            statistics.append(trained[count:])
            assert reply.message["weights"].statistics.tolist() == trained[count:], "statistics travel whole"
        after = rounds.play_round(run.plan, state, index).state
        expected = [w + d for w, d in zip(state.weights[:count].tolist(), byhand.mean(changes, samples), strict=True)]
        expected += byhand.mean(statistics, samples)
        torch.testing.assert_close(after.weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)
        state = after


def restored_by_hand_of(short, moved, groups, norm):
    """As `restored_by_hand`, where W^n − W_received is known up to float32's own rounding only."""
    result = []
    levels, scales = short.values.levels.tolist(), short.values.scales.tolist()
    for scale, part, mine in zip(scales, cut(moved, groups), cut(levels, groups), strict=True):
        assert scale == pytest.approx(scale_of(part, norm), rel=1e-3, abs=1e-6)
        for x, level in zip(part, mine, strict=True):
            assert abs(level * scale / 127 - x) <= scale / 127 + 1e-6
            result.append(level * scale / 127)
    return result


def test_rounding_the_broadcast_never_reaches_the_server(toy):
    """Clients that change nothing leave W as it was, though what they received is off by up to a level."""
    run = toy("fedpaq", "mlp", train={"lr": 1e-30})
    begun = state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    order = Order.of(exchange, run.plan.round(0, state.mask), run.layout, state, key=1)
    assert (order.reference - state.weights).abs().max() > 1e-4
    for index in range(3):
        state = rounds.play_round(run.plan, state, index).state
    torch.testing.assert_close(state.weights, begun.weights, rtol=0, atol=1e-7)


def test_every_client_and_round_has_a_rounding_of_its_own(toy):
    """Two clients with the same data and one batch make the same change; a third of its values are rounded to other levels."""
    run = toy("fedpaq", "mlp", clients={"total": 2, "per_round": 2}, train={"batch_size": 120})
    run.plan.engine.rows = [run.plan.engine.rows[0]] * 2
    state, shorts = run.method.begin(run.setup), {}
    for index in (0, 1):
        current = run.plan.round(index, state.mask)
        (exchange,) = run.plan.exchanges(current)
        order = Order.of(exchange, current, run.layout, state, run.plan.key(index, "rounding 0"))
        shorts[f"down {index}"] = quantised(order.sent["weights"])
        same = Order.of(exchange, current, run.layout, state, run.plan.key(0, "rounding 0"))  # the same model in both rounds
        for reply in run.plan.engine.run(same, [0, 1]):
            shorts[f"up {index} {reply.client}"] = quantised(reply.message["weights"])
    for a, b in (("down 0", "down 1"), ("up 0 0", "up 0 1"), ("up 0 0", "up 1 0")):
        torch.testing.assert_close(shorts[a].scales, shorts[b].scales, rtol=1e-3, atol=1e-7)
        assert (shorts[a].levels != shorts[b].levels).float().mean() > 0.15


# -- what travels ---------------------------------------------------------------------------------------------------------


def tiny():
    """Convolution 2×(1·3·3) + 2, BatchNorm 2 + 2 and 2·2 statistics, linear 3×8 + 3: 51 parameters in 6 tensors."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize(("grain", "scales"), [("channel", 2 + 3 + 4), ("tensor", 6)])
def test_bytes_of_a_tiny_model(grain, scales):
    """One byte a parameter, four a scale (a row of each matrix, every vector as a whole) and four a statistic."""
    module = tiny()
    layout = Layout.of(module)
    assert layout.parameters == 18 + 2 + 2 + 2 + 24 + 3
    weights = layout.flatten(module.state_dict())
    method = FedPAQ(granularity=grain)
    state = method.begin(Setup(layout, weights, (1, 4, 4), rng=lambda purpose: 0))
    current = Round.of(0, Schedule(), state.mask, layout)
    (exchange,) = method.exchanges(current)
    order = Order.of(exchange, current, layout, state, key=3)
    by_hand = 51 * 1 + 4 * scales + 4 * 4
    for kind, fields, message, frame in (
        (Kind.DOWNLOAD, exchange.down, order.sent, order.frame),
        (Kind.UPLOAD, exchange.up, {"weights": exchange.up["weights"].take({"weights": weights}, order.upload_frame())}, order.frame),
    ):
        header = Header(kind, bytes.fromhex(layout.fingerprint), state.mask.fingerprint, 0, 0, 0)
        whole = len(codec.encode(header, fields, message, frame, state.mask))
        assert whole == codec.size(kind, fields, message, frame, state.mask)
        assert whole - len(codec.encode(header, {}, {}, frame, state.mask)) == by_hand


def test_a_downlink_in_full_precision(toy):
    whole, short = (toy("fedpaq", "cnn", method_options={"downlink": downlink}) for downlink in ("float32", "int8"))
    states = [run.method.begin(run.setup) for run in (whole, short)]
    records = [rounds.play_round(run.plan, state, 0).record for run, state in zip((whole, short), states, strict=True)]
    assert records[0].upload_bytes == records[1].upload_bytes
    layout, scales = whole.layout, len(list(channels(whole.layout, "channel")))
    difference = 4 * layout.parameters - layout.parameters - 4 * scales
    assert records[0].download_bytes - records[1].download_bytes == 3 * difference
    (exchange,) = whole.plan.exchanges(whole.plan.round(0, states[0].mask))
    assert exchange.down["weights"].type == "float32"
    assert exchange.up["weights"].type == "int8"


RUN: dict[str, Any] = {
    "data": "toy_images",
    "model": "cnn",
    "model_options": {"width": 4},
    "method": "fedpaq",
    "rounds": 2,
    "clients": {"total": 4, "per_round": 2, "partition": "iid", "min_size": 1},
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.1},
}


def test_the_type_of_values_in_general_does_not_override_its_own(tmp_path):
    plain = fedrts.run(**RUN, out=tmp_path / "plain")
    asked = fedrts.run(**RUN, out=tmp_path / "asked", value_type="float16")
    assert torch.equal(plain.state.weights, asked.state.weights)
    for name in ("upload_bytes", "download_bytes", "paper_comm_mb"):
        assert plain.summary[name] == asked.summary[name]
    assert plain.summary["comm_ratio"] < 0.5


def resnet18():
    """torchvision's shapes with 10 classes: 11,166,912 weights of convolutions, 9,600 of BatchNorm, 5,130 of the output."""
    shapes = [(64, 3, 7, 7)]
    for stage, width in enumerate((64, 128, 256, 512)):
        before = max(width // 2, 64)
        shapes += [(width, before, 3, 3), *[(width, width, 3, 3)] * 3]
        if stage:
            shapes.append((width, before, 1, 1))
    dense = [Entry((f"bn{i}.{part}",), (shape[0],)) for i, shape in enumerate(shapes) for part in ("weight", "bias")]
    dense += [Entry(("fc.weight",), (10, 512)), Entry(("fc.bias",), (10,))]
    buffers = [Entry((f"bn{i}.running_{part}",), (shape[0],)) for i, shape in enumerate(shapes) for part in ("mean", "var")]
    return Layout(tuple(Entry((f"conv{i}.weight",), shape) for i, shape in enumerate(shapes)), tuple(dense), tuple(buffers))


def both_ways(layout, method):
    mask = Mask.full(layout.sizes)
    (exchange,) = method.exchanges(Round.of(0, Schedule(), mask, layout))
    return sum(exchange.charged(Book.paper(layout, 1.0, 0.4)))


def test_the_published_megabytes():
    layout = resnet18()
    assert (layout.links, layout.parameters, layout.length) == (11_166_912, 11_181_642, 11_191_242)
    scales = sum(entry.shape[0] for entry in layout.parameter_entries if len(entry.shape) > 1)
    assert scales == 4_810
    assert both_ways(layout, FedPAQ()) == 2 * (11_181_642 + 4 * 9_600 + 4 * 4_810)
    assert round(both_ways(layout, FedPAQ()) / 1e6, 3) == 22.479
    assert both_ways(layout, FedPAQ(downlink="float32")) == 11_181_642 + 4 * (9_600 + 4_810) + 4 * 11_191_242
    assert both_ways(layout, FedPAQ(granularity="tensor")) == 2 * (11_181_642 + 4 * (9_600 + 21)), "a scale for each of 21 matrices"


def test_what_would_really_travel_is_all_but_the_same():
    """The codec scales the 41 vectors too."""
    layout = resnet18()
    mask = Mask.full(layout.sizes)
    (exchange,) = FedPAQ().exchanges(Round.of(0, Schedule(), mask, layout))
    for entry in (exchange.down["weights"], exchange.up["weights"]):
        assert entry.size(None, Frame(layout, mask)) == 11_181_642 + 4 * 9_600 + 4 * (4_810 + 41)


@pytest.mark.parametrize(("uplink", "downlink", "most"), [("int6", "int8", 0.8), ("int4", "int4", 0.55), ("int2", "float32", 0.3)])
def test_fewer_bits_by_its_own_options(toy, uplink, downlink, most):
    """Uploads shrink by the bits at least, the server keeps its precision and the broadcast has a type of its own."""
    run, usual = toy("fedpaq", "cnn", method_options={"uplink": uplink, "downlink": downlink}), toy("fedpaq", "cnn")
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    assert (exchange.down["weights"].type, exchange.up["weights"].type) == (downlink, uplink)
    records = [rounds.play_round(which.plan, which.method.begin(which.setup), 0).record for which in (run, usual)]
    scales = 4 * len(list(channels(run.layout, "channel"))) + 4 * (run.layout.length - run.layout.parameters) + 39
    sent, whole = ((record.upload_bytes - 3 * scales) for record in records)
    assert 0 < sent <= most * whole


def test_a_whole_downlink_stays_whole_whatever_values_travel_as(toy):
    run = toy("fedpaq", "mlp", method_options={"downlink": "float32"}, wire={"value_type": "int8"})
    state = run.method.begin(run.setup)
    (exchange,) = run.plan.exchanges(run.plan.round(0, state.mask))
    assert (exchange.down["weights"].type, exchange.up["weights"].type) == ("float32", "int8")
