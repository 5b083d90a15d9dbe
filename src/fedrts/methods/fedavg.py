"""FedAvg (McMahan et al., 2017): the dense reference.

Down all weights, local training, up all weights; W ← Σ p_k W^k.
"""

from fedrts.methods import register
from fedrts.methods.base import Method


@register("fedavg")
class FedAvg(Method):
    """Dense federated averaging; the reference for accuracy and for bytes."""
