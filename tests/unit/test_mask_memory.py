"""Who holds which mask: a download tells a client what it lacks and no more, and every byte that is counted would really travel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fedrts.client import envelope, masks
from fedrts.client.masks import REMEMBERED, LastMasks
from fedrts.client.order import Order, Reply
from fedrts.methods.contract import State
from fedrts.server.client_records import ClientRecords
from fedrts.server.guard import Guard
from fedrts.server.mask_memory import Lengths, MaskMemory, addressed
from fedrts.server.rounds import play_round
from fedrts.sparse import random
from fedrts.sparse.layout import Entry, Layout
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.errors import MaskMissingError
from fedrts.wire.fields import Frame, Message, Values
from fedrts.wire.value_types import FORMATS, ValueType

LAYOUT = Layout((Entry(("a",), (40, 30)), Entry(("b",), (600,))), (Entry(("bias",), (3,)),), (Entry(("mean",), (2,)),))


def mask_of(seed: int, density: float = 0.2) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    return Mask(torch.rand(LAYOUT.links, generator=generator) < density, LAYOUT.sizes)


def swapped(mask: Mask, links: int) -> Mask:
    bits = mask.bits.clone()
    bits[:links] ^= True
    return Mask(bits, mask.sizes)


def cost(mask: Mask, held: Mask | None) -> int:
    return codec.mask_size(Frame(LAYOUT, mask), held)


def test_a_client_that_never_took_part_gets_the_whole_mask() -> None:
    book = MaskMemory()
    book.send(1, mask_of(0))
    assert book.held_by(2) is None
    assert cost(mask_of(0), book.held_by(2)) > 1 + LAYOUT.links * 0.7 / 8  # 0.72 bits per link is the entropy at density 0.2


def test_a_client_that_holds_the_mask_pays_one_byte() -> None:
    book = MaskMemory()
    book.send(1, mask_of(0))
    assert book.held_by(1) == mask_of(0)
    assert cost(mask_of(0), book.held_by(1)) == 1


def test_a_client_with_an_older_mask_gets_the_cheaper_form() -> None:
    book = MaskMemory()
    book.send(1, mask_of(0))
    near, far = swapped(mask_of(0), 5), mask_of(1)
    assert 1 < cost(near, book.held_by(1)) < 30 < cost(near, None)
    assert cost(far, book.held_by(1)) == cost(far, None), "two unrelated masks differ in more links than one has"


def test_a_client_holds_what_it_was_sent_last() -> None:
    book = MaskMemory()
    for seed in range(3):
        book.send(1, mask_of(seed))
    book.send(2, mask_of(1))
    assert book.held_by(1) == mask_of(2)
    assert book.held_by(2) == mask_of(1)


def test_masks_older_than_the_last_eight_are_forgotten() -> None:
    assert REMEMBERED == 8
    book = MaskMemory()
    for seed in range(12):
        book.send(seed, mask_of(seed))
        assert len(book.masks) == min(seed + 1, REMEMBERED)
        assert [client for client in range(12) if book.held_by(client) is not None] == list(range(max(0, seed - 7), seed + 1))
    assert cost(mask_of(12), book.held_by(0)) == cost(mask_of(12), None)


def test_sending_a_mask_again_makes_it_no_second_one() -> None:
    book = MaskMemory()
    for _ in range(20):
        book.send(1, mask_of(0))
        book.send(2, mask_of(1))
    assert len(book.masks) == 2


def test_a_mask_that_comes_back_is_among_the_last() -> None:
    """Masks 0 … 7, then mask 0 again, then a new one: it is mask 1 that is the oldest now."""
    book = MaskMemory()
    for seed in [*range(REMEMBERED), 0, REMEMBERED]:
        book.send(seed, mask_of(seed))
    assert book.held_by(0) == mask_of(0)
    assert book.held_by(1) is None
    assert list(book.masks)[-1] == mask_of(REMEMBERED).fingerprint, "the newest last"


@pytest.mark.parametrize("sizes", [(1200, 600), (7,), ()])
def test_the_book_survives_a_checkpoint(sizes: tuple[int, ...]) -> None:
    """Also of a model without prunable weights, which dense methods take."""
    ledger = ClientRecords.of(Guard())
    for client in range(12):
        bits = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(client)) < 0.5
        ledger.traffic.send(client, Mask(bits, sizes))
    restored = ClientRecords.restored(ledger.tensors(), sizes, Guard(), "cpu").traffic
    assert list(restored.masks) == list(ledger.traffic.masks)
    assert [restored.held_by(client) for client in range(13)] == [ledger.traffic.held_by(client) for client in range(13)]


@pytest.mark.parametrize("type", FORMATS)
def test_lengths_are_those_of_the_codec(type: ValueType, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(0)
    frame, fields = Frame(LAYOUT, mask), {"weights": Values(type=type)}
    message: Message = {"weights": fields["weights"].take({"weights": torch.randn(LAYOUT.length)}, frame)}
    header = Header(Kind.DOWNLOAD, bytes.fromhex(LAYOUT.fingerprint), mask.fingerprint, 0, 0, 0)
    lengths = Lengths(fields, message, frame)
    holdings = [None, mask, swapped(mask, 4), mask_of(1), Mask.full(LAYOUT.sizes)]
    expected = [codec.size(Kind.DOWNLOAD, fields, message, frame, held) for held in holdings]
    assert [lengths.download(held) for held in holdings] == expected
    assert [len(codec.encode(header, fields, message, frame, held)) for held in holdings] == expected
    assert expected[1] < expected[2] < expected[0] == expected[3] == expected[4]  # to tell unrelated masks apart costs more than the whole

    monkeypatch.setattr(codec, "size", None)  # every length is known by now
    assert [lengths.download(held) for held in holdings] == expected


# A federation whose messages really travel


@dataclass
class Wire:
    """An engine between server and clients: every order and every reply is encoded and decoded, as on Flower's way.

    Each client is a site of its own, which remembers the masks that it decoded; the order says which one the server counts on.
    """

    inner: Any
    state: State | None = None
    """What the server has: set before each round."""
    remembered: dict[int, LastMasks] = field(default_factory=lambda: defaultdict(LastMasks))
    down: int = 0
    up: int = 0
    forms: set[int] = field(default_factory=set)

    def run(self, order: Order, clients: Sequence[int]) -> Iterator[Reply]:
        for client in clients:
            self._download(order, client)
        for reply in self.inner.run(order, clients):
            data = envelope.encode_reply(reply, order)
            self.up += len(data)
            yield replace(envelope.decode_reply(data, order), size=None)

    def evaluate(self, state: State) -> Any:
        return self.inner.evaluate(state)

    def _download(self, order: Order, client: int) -> None:
        frame, fields = order.frame, order.exchange.down
        data = envelope.encode_order(order, client, order.held[client])
        self.down += len(data)
        self.forms.add(data[35])

        header, mask, reader = self.remembered[client].open(data, frame.layout)
        here = Frame(frame.layout, mask, frame.dtype)
        message = codec.read_fields(reader, fields, here)
        weights = fields["weights"].put(message["weights"], here)
        assert (header.client, header.round, header.exchange) == (client, order.round.index, order.round.exchange)
        assert self.state is not None
        assert mask == self.state.mask
        assert torch.equal(weights, fields["weights"].put(order.sent["weights"], frame))
        if isinstance(fields["weights"], Values) and fields["weights"].type == "float32":
            assert torch.equal(weights, self.state.weights)


@pytest.mark.parametrize(
    ("method", "model", "type", "kept", "forms"),
    [
        ("fedrts", "mlp", "float32", 8, {0, 1, 2}),
        ("fedrts", "mlp", "float32", 1, {0, 1, 2}),
        ("fedrts", "cnn", "float32", 8, {0, 1, 2}),
        ("fedrts", "cnn", "int8", 2, {0, 1, 2}),
        ("feddst", "cnn", "int8", 8, {0, 1, 2}),
        ("feddst", "cnn", "int4", 8, {0, 1, 2}),
        ("fedrts", "mlp", "int2", 8, {0, 1, 2}),
        ("fedavg", "mlp", "int6", 8, {0, 1}),
        ("fedsgc", "mlp", "float16", 8, {0, 1, 2}),
        ("random", "tiny_gpt", "float16", 8, {0, 1}),
        ("fedavg", "mlp", "float32", 8, {0, 1}),
    ],
)
def test_the_bytes_of_a_run_are_those_of_its_messages(
    toy: Any, monkeypatch: pytest.MonkeyPatch, method: str, model: str, type: str, kept: int, forms: set[int]
) -> None:
    monkeypatch.setattr(masks, "REMEMBERED", kept)
    run = toy(method, model, rounds=12, topology={"interval": 2, "end": 10}, wire={"value_type": type}, eval={"every": 100})
    wire = Wire(run.plan.engine)
    plan, ledger, state = replace(run.plan, engine=wire), ClientRecords.of(run.plan.guard), run.method.begin(run.setup)
    for index in range(plan.rounds):
        wire.state, wire.down, wire.up = state, 0, 0
        played = play_round(plan, state, index, ledger)
        assert played.record.rejected == []
        assert played.record.download_bytes == wire.down
        assert played.record.upload_bytes == wire.up
        state = played.state
    assert wire.forms == forms
    held = {client: list(own)[-1] for client, own in wire.remembered.items()}
    assert ledger.traffic.holds == {client: name for client, name in held.items() if name in ledger.traffic.masks}
    assert len(ledger.traffic.masks) <= kept


@pytest.mark.parametrize("loss", [0.0, 0.4])
def test_a_client_that_lost_its_masks_says_so_and_reads_the_whole(toy: Any, loss: float) -> None:
    """Clients over real bytes, some of which forget what they held between rounds: all read the server's mask and weights."""
    run = toy("fedrts", "cnn", rounds=9)
    book, sites = MaskMemory(), [LastMasks() for _ in range(5)]
    state, repeated = run.method.begin(run.setup), 0
    for index in range(9):
        current = run.plan.round(index, state.mask)
        clients, exchange = run.plan.sample(index), run.method.exchanges(current)[0]
        order, size = addressed(Order.of(exchange, current, run.layout, state, key=0), clients, book)
        sent = {client: envelope.encode_order(order, client, order.held[client]) for client in clients}
        assert size == sum(map(len, sent.values()))
        for client, data in sent.items():
            if float(random.uniform(random.key("lost", index, client), 1)) < loss:
                sites[client].clear()
            try:
                header, mask, reader = sites[client].open(data, run.layout)
            except MaskMissingError:
                assert order.held[client] is not None, "a whole mask counts on none"
                repeated += 1
                header, mask, reader = sites[client].open(envelope.encode_order(order, client, None), run.layout)
            frame = replace(order.frame, mask=mask)
            message = codec.read_fields(reader, order.exchange.down, frame)
            assert (header.client, header.round) == (client, index)
            assert mask == state.mask
            assert torch.equal(order.exchange.down["weights"].put(message["weights"], frame), state.weights)
        state = play_round(run.plan, state, index).state
    assert (repeated > 0) == (loss > 0)
