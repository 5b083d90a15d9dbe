"""A model as a `torch.export` program, checked against the module before it is delivered; it needs torch but not our code."""

from __future__ import annotations

import io
import warnings

import torch
from torch import Tensor, nn

from fedrts.errors import InputError, reason
from fedrts.export.formats import ExportFormat, answering, as_bytes, checked_batches, is_language, register


def program_bytes(module: nn.Module, inputs: Tensor) -> bytes:
    """The file of `torch.export.save` of `module` for inputs like `inputs [batch, …]`, with free batch size and, for language, length.

    What `torch.export.load` makes of it must give the module's outputs, to the bit or nearly so; otherwise this is an error.
    """
    module = answering(module, inputs)
    language = is_language(module, inputs)
    free = {0: torch.export.Dim("batch")} | ({1: torch.export.Dim("length", max=inputs.shape[1])} if language else {})
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (torch.cat([inputs, inputs])[:3],), dynamic_shapes=(free,), strict=False)
            torch.export.save(program, buffer)
    except Exception as error:  # torch.export has many
        raise InputError(f"torch.export cannot take this model: {reason(error)}; use --format safetensors") from error
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for batch in checked_batches(inputs, language):
        with torch.no_grad():
            wanted, given = module(batch), loaded(batch)
        if given.shape != wanted.shape or not torch.allclose(given, wanted, rtol=1e-5, atol=1e-5):
            raise InputError(f"the program disagrees with the model on inputs of shape {list(batch.shape)}: nothing was written")
    return buffer.getvalue()


register("torch")(
    ExportFormat("a program for torch.export.load", ".pt2", as_bytes(lambda source: program_bytes(source.model, source.inputs)))
)
