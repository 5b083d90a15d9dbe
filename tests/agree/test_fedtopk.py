"""Top-k both ways: what travels, what it adds up to, and what it costs clients that sat out rounds."""

from dataclasses import replace

import pytest
import torch

from fedrts.client.envelope import encode_order
from fedrts.client.order import Order
from fedrts.server import rounds
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.wire.errors import WireError
from fedrts.wire.fields import RESIDUAL, Frame, Largest, Missed, OwnValues, Steps, Values, carried
from fedrts.wire.packing import Reader
from helping import fault

TYPES = ("float32", "int8", "int4")
LAYOUT = Layout((Entry(("a",), (2, 4)), Entry(("b",), (6,))), (Entry(("bias",), (2,)),), (Entry(("mean",), (1,)),))
HELD = torch.zeros(LAYOUT.length)
FRAME = Frame(LAYOUT, Mask.full(LAYOUT.sizes), reference=HELD)
MOVED = torch.tensor([0.0, -5, 1, 0, 2, 0, 0, 3, 0, 1, -2, 0, 0, 4, 0.25, -0.5, 9])
"""Layer a: 8 links, b: 6; two biases; one statistic."""


def bits(*places):
    return torch.zeros(LAYOUT.links, dtype=torch.bool).index_fill(0, torch.tensor(places), True)


# -- the field of an upload ------------------------------------------------------------------------------------------


def test_the_largest_changes_of_each_layer_travel_and_the_rest_is_left():
    field, before = Largest(0.25), torch.full((LAYOUT.parameters,), 0.5)
    payload = field.take({"weights": MOVED, RESIDUAL: before}, FRAME)
    owed = MOVED[:16] + 0.5  # a quarter of 8 and of 6 links are 2 and 2: −4.5 and 3.5 of layer a
    largest = [1, 7, *sorted((8 + owed[8:14].abs().argsort(descending=True, stable=True)[:2]).tolist())]
    assert payload.mask.active.tolist() == largest
    assert carried(payload.values, torch.Tensor).tolist() == [*owed[largest].tolist(), *owed[14:].tolist(), 9.0]
    told = torch.zeros(16)
    told[[*largest, 14, 15]] = owed[[*largest, 14, 15]]
    assert torch.equal(field.left(payload, {"weights": MOVED, RESIDUAL: before}, FRAME), owed - told)
    reference = torch.arange(17.0)
    assert torch.equal(field.open(payload, replace(FRAME, reference=reference)), torch.cat([reference[:16] + told, MOVED[16:]]))


def test_changes_on_the_wire_are_stable():
    payload = OwnValues(Mask(bits(1, 7, 10, 13), LAYOUT.sizes), torch.tensor([-5.0, 3, -2, 4, 0.25, -0.5, 9]))
    data = b"".join(Largest(0.25).write(payload, FRAME))
    named = "03 01 82 03 01 24"  # two bitmaps of one byte
    assert data.hex(" ") == f"{named} 00 00 a0 c0 00 00 40 40 00 00 00 c0 00 00 80 40 00 00 80 3e 00 00 00 bf 00 00 10 41"
    again = Largest(0.25).read(Reader(data), FRAME)
    assert again.mask == payload.mask
    assert torch.equal(carried(again.values, torch.Tensor), carried(payload.values, torch.Tensor))


@pytest.mark.parametrize("type", [*TYPES, "int2", "float16"])
@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
def test_bytes_are_counted_exactly_and_read_back(type, share):
    field = Largest(share, type=type)
    payload = field.take({"weights": MOVED}, FRAME)
    data = b"".join(field.write(payload, FRAME))
    assert len(data) == field.size(payload, FRAME) <= field.most(FRAME)
    assert torch.equal(field.open(field.read(Reader(data), FRAME), FRAME), field.open(payload, FRAME))
    assert torch.equal(field.open(field.of_tensors(field.tensors(payload), FRAME), FRAME), field.open(payload, FRAME))
    assert fault(field.checks(payload, FRAME)) is None


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (MOVED, "not a change"),
        (None, "not a change"),
        (OwnValues(Mask(torch.ones(4, dtype=torch.bool), (4,)), torch.zeros(7)), "not a change"),
        (OwnValues(Mask(bits(1, 2, 3, 9), LAYOUT.sizes), torch.zeros(7)), "links named"),
        (OwnValues(Mask(bits(1, 2, 9), LAYOUT.sizes), torch.zeros(6)), "links named"),
        (OwnValues(Mask(bits(1, 2, 9, 10), LAYOUT.sizes), torch.zeros(6)), "asked for"),
        (OwnValues(Mask(bits(1, 2, 9, 10), LAYOUT.sizes), torch.full((7,), torch.nan)), "not finite"),
        (OwnValues(Mask(bits(1, 2, 9, 10), LAYOUT.sizes), torch.zeros(7, dtype=torch.float64)), "asked for"),
    ],
)
def test_wrong_changes_get_a_reason(payload, reason):
    assert reason in str(fault(Largest(0.25).checks(payload, FRAME)))


def test_a_pruned_model_has_no_largest_changes():
    with pytest.raises(ValueError, match="not pruned"):
        Largest(0.25).take({"weights": MOVED}, Frame(LAYOUT, Mask(bits(1), LAYOUT.sizes)))


# -- the field of a broadcast ----------------------------------------------------------------------------------------


def walked(type, steps):
    """The tensors of a server whose model moves at random, and the public models on the way."""
    field = Missed(Largest(0.25, type=type))
    generator = torch.Generator().manual_seed(1)
    tensors, model = field.begun(MOVED, FRAME), MOVED
    publics = [tensors["public"]]
    for _ in range(steps):
        model = model + torch.randn(LAYOUT.length, generator=generator)
        tensors = field.advanced(tensors, model, FRAME)
        publics.append(tensors["public"])
    return field, tensors, publics


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("missed", [None, 0, 1, 2])
def test_a_client_arrives_at_the_same_model_whatever_it_missed(type, missed):
    field, tensors, publics = walked(type, 5)
    frame = replace(FRAME, missed=missed, reference=None)
    payload = field.take(tensors, frame)
    data = b"".join(field.write(payload, frame))
    assert len(data) == field.size(payload, frame) <= field.most(frame)
    received = field.read(Reader(data), frame)
    held = publics[-1 - missed] if missed is not None else None
    assert torch.equal(field.put(received, replace(frame, reference=held)), publics[-1])
    assert torch.equal(field.put(payload, frame), publics[-1])


def test_a_client_gets_the_whole_where_that_is_less_or_steps_are_forgotten():
    field, tensors, _ = walked("float32", Missed.KEPT + 3)
    frame = replace(FRAME, reference=None)
    payload = field.take(tensors, frame)
    assert len(payload.steps) == Missed.KEPT
    first = [next(field.write(payload, replace(frame, missed=missed)))[0] for missed in (None, 0, 1, Missed.KEPT, Missed.KEPT + 1)]
    assert first == [255, 0, 1, 255, 255]
    sizes = [field.size(payload, replace(frame, missed=missed)) for missed in range(5)]
    assert sizes == sorted(sizes)
    assert max(sizes) == 1 + 4 * LAYOUT.length


def test_more_steps_than_there_can_be_are_no_message():
    with pytest.raises(WireError, match="steps"):
        Missed(Largest(0.25)).read(Reader(bytes([33])), FRAME)
    with pytest.raises(WireError, match="lead nowhere"):
        Missed(Largest(0.25)).put(Steps(None, ()), replace(FRAME, reference=None))
    assert "downloads" in str(fault(Missed(Largest(0.25)).checks(Steps(MOVED, ()), FRAME)))


# -- the method ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", TYPES)
def test_rounds_are_the_equations(toy, values):
    """W ← W + Σ p_k T_k, V ← V + T(W − V), e_k ← ΔW + e_k − T_k, of plain loops over layers."""
    options = {"share": 0.2, "share_down": 0.1, "values": values}
    run = toy("fedtopk", "cnn", method_options=options, clients={"total": 3, "per_round": 2})
    layout, ledger = run.layout, ClientRecords.of(run.plan.guard)
    state = run.method.begin(run.setup)
    residuals = {client: torch.zeros(layout.parameters) for client in range(3)}
    for index in range(4):
        public, server = state["public"], state.values
        played = rounds.play_round(run.plan, state, index, ledger)
        dense = replace(
            run.method.exchanges(run.plan.round(index, state.mask))[0], down={"weights": Values(of="public")}, up={"weights": Values()}
        )
        order = Order.of(dense, run.plan.round(index, state.mask), layout, state, 0)
        mean = torch.zeros(layout.length, dtype=torch.float64)
        total = sum(run.plan.samples[client] for client in played.record.clients)
        for reply in run.plan.engine.run(order, played.record.clients):
            kept = layout.parameters
            owed = reply.message["weights"][:kept] - public[:kept] + residuals[reply.client]
            sent = top(owed, 0.2, layout)
            if values != "float32":
                sent = owed - ledger.residuals[reply.client]
                assert sent[: layout.links].count_nonzero() <= sum(Largest(0.2).counts(layout.sizes))
            residuals[reply.client] = owed - sent
            torch.testing.assert_close(ledger.residuals[reply.client], residuals[reply.client], rtol=0, atol=1e-6)
            moved = torch.cat([server[:kept] + sent, reply.message["weights"][kept:]])
            mean += moved.double() * run.plan.samples[reply.client] / total
        torch.testing.assert_close(played.state.values, mean.float(), rtol=1e-5, atol=1e-6)
        if values == "float32":
            expected = public[: layout.parameters] + top((played.state.values - public)[: layout.parameters], 0.1, layout)
            torch.testing.assert_close(played.state["public"][: layout.parameters], expected, rtol=0, atol=1e-6)
        state = played.state


def top(change, share, layout):
    """The largest magnitudes of each layer, and all that is not prunable."""
    sent, start = change.clone(), 0
    for size in layout.sizes:
        part = change[start : start + size]
        least = part.abs().sort(descending=True).values[max(1, round(share * size)) - 1]
        sent[start : start + size] = torch.where(part.abs() >= least, part, torch.zeros_like(part))
        start += size
    return sent


@pytest.mark.parametrize("values", TYPES)
def test_downloads_are_as_long_as_they_are_counted(toy, values):
    """Also for clients that sat out rounds."""
    run = toy("fedtopk", "mlp", method_options={"values": values}, clients={"total": 5, "per_round": 2})
    state, ledger = run.method.begin(run.setup), ClientRecords.of(run.plan.guard)
    last: dict[int, int] = {}
    lengths = set()
    for index in range(7):
        order = Order.of(run.plan.exchanges(run.plan.round(index, state.mask))[0], run.plan.round(index, state.mask), run.layout, state, 0)
        clients, size = run.plan.sample(index), 0
        for client in clients:
            missed = index - last[client] if client in last else None
            told = replace(order, frame=replace(order.frame, missed=missed))
            size += len(encode_order(told, client, state.mask if client in last else None))
            lengths.add(missed)
            last[client] = index
        played = rounds.play_round(run.plan, state, index, ledger)
        assert played.record.download_bytes == size
        state = played.state
    assert len(lengths) > 2, "some sat out more rounds than others"


def test_who_received_what_survives_a_checkpoint(toy):
    run = toy("fedtopk", "mlp", clients={"total": 5, "per_round": 2})
    ledger = ClientRecords.of(Guard())
    state = rounds.play_round(run.plan, run.method.begin(run.setup), 0, ledger).state
    again = ClientRecords.restored(ledger.tensors(), run.layout.sizes, Guard(), "cpu")
    first, second = (rounds.play_round(run.plan, state, 1, one).record.download_bytes for one in (ledger, again))
    assert first == second
    assert first < rounds.play_round(run.plan, state, 1).record.download_bytes


def test_short_messages_are_short(toy):
    sizes = {}
    for values in TYPES:
        run = toy("fedtopk", "mlp", method_options={"values": values, "share": 0.2})
        sizes[values] = rounds.play_round(run.plan, run.method.begin(run.setup), 0).record.upload_bytes
    dense = rounds.play_round((run := toy("fedavg", "mlp")).plan, run.method.begin(run.setup), 0).record.upload_bytes
    assert dense > 2.5 * sizes["float32"] > 2.5 * sizes["int8"] > 2.5 * sizes["int4"]
