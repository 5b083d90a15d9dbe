"""Small things that several tests need."""

import torch

from fedrts import data
from fedrts.client.order import Order, Replies
from fedrts.data.official import Source
from fedrts.methods.contract import Round
from fedrts.sparse.layout import Entry, Layout
from fedrts.wire.checks import faults
from fedrts.wire.fields import changed


def order_of(run, exchange, state, index, number=0):
    """The order that the server of a run would give for an exchange."""
    return Order.of(exchange, run.plan.round(index, state.mask, number), run.layout, state, key=0)


def ask(run, exchange, state, index, clients):
    """The replies of `clients` to an exchange."""
    return list(run.plan.engine.run(order_of(run, exchange, state, index), clients))


def as_one(replies):
    """Replies with the same fields and shapes as those of clients side by side."""

    def stacked(*payloads):
        tensors = [iter(tensors_of(payload)) for payload in payloads]
        return changed(payloads[0], lambda tensor: torch.stack([next(own) for own in tensors]))

    first, left = replies[0], [reply.left for reply in replies]
    return Replies(
        [reply.client for reply in replies],
        first.round,
        first.exchange,
        [reply.samples for reply in replies],
        {name: stacked(*(reply.message[name] for reply in replies)) for name in first.message},
        [reply.flops for reply in replies],
        torch.tensor([reply.loss for reply in replies]),
        None if left[0] is None else torch.stack(left),
    )


def tensors_of(payload):
    """The tensors that a payload is made of."""
    found = []

    def noted(tensor):
        found.append(tensor)
        return tensor

    changed(payload, noted)
    return found


def layout_of(mask):
    """A layout whose layers are vectors, of the mask's sizes."""
    return Layout(tuple(Entry((f"layer{index}.weight",), (size,)) for index, size in enumerate(mask.sizes)), (), ())


def round_of(index, schedule, mask):
    """A round of a model that is nothing but its mask."""
    return Round.of(index, schedule, mask, layout_of(mask))


def assert_one_line_error(ended, *words: str) -> None:
    """Exit 2 and one line on stderr: what, where, remedy."""
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.endswith("\n")
    assert ended.err.count("\n") == 1, ended.err
    assert "Traceback" not in ended.err
    assert all(word in ended.err for word in words), ended.err


def source_of(name: str) -> Source:
    """Where a data set comes from that is not in the package."""
    source = data.source(name)
    assert source is not None
    return source


def instruction_sets() -> list[str]:
    """On which the sparse kernels run here, the best last; none without the library."""
    try:
        import fedrts_kernels

        return list(fedrts_kernels.load().isas)
    except (ImportError, OSError):
        return []


def fault(checks):
    """The first thing that is wrong by these checks, if any is."""
    return faults([list(checks)])[0]
