"""Small things that several tests need."""

from fedrts.client import Order
from fedrts.methods.contract import Round


def order_of(run, exchange, state, index, number=0):
    """The order that the server of a run would give for an exchange."""
    return Order.of(exchange, Round.of(index, run.plan.schedule, state.mask, number), run.layout, state, key=0)


def ask(run, exchange, state, index, clients):
    """The replies of `clients` to an exchange."""
    return list(run.plan.engine.run(order_of(run, exchange, state, index), clients))
