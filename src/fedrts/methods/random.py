"""Static random pruning: the control for every method that adjusts its topology.

A uniformly random mask with the ERK budget of each layer, fixed for the whole run; otherwise federated averaging.
"""

from fedrts.methods import register
from fedrts.methods.base import Sparse


@register("random")
class Random(Sparse):
    """A random mask that never changes; the control for dynamic topologies."""
