"""Sending the final model to sites whose experiment shares it (`clients.share_model`)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrts.runs.build import Assembled
from fedrts.sparse.mask import Mask
from fedrts.wire import codec
from fedrts.wire.codec import Header, Kind
from fedrts.wire.errors import WireError
from fedrts.wire.fields import Frame, Values

_FIELDS = {"weights": Values()}


def encoded(run: Assembled) -> bytes:
    """Encode the model of a finished run like any download: its non-zero links, and everything unpruned."""
    weights = run.layout.flatten(run.module.state_dict()).cpu()
    mask = Mask(run.layout.sizes.touched(weights[: run.layout.links] != 0), run.layout.sizes)
    frame = Frame(run.layout, mask, weights.dtype)
    header = Header(Kind.DOWNLOAD, bytes.fromhex(run.layout.fingerprint), mask.fingerprint, run.plan.rounds, 0, 0)
    return codec.encode(header, _FIELDS, {"weights": mask.compact(weights)}, frame)


def decoded(data: bytes, run: Assembled) -> dict[str, Tensor]:
    """Decode the tensors of a model by name; a `WireError` if they do not fit this experiment or are not finite."""
    _, mask, reader = codec.open_download(data, run.layout, None)
    frame = Frame(run.layout, mask, run.bench.dtype)
    values = codec.read_fields(reader, _FIELDS, frame)["weights"]
    if not isinstance(values, Tensor) or not bool(torch.isfinite(values).all()):
        raise WireError("the final model has values that are no numbers")
    return run.layout.state_dict(mask.expand(values))
