"""A model as an ONNX file, held against the module before it is handed out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrts.errors import InputError, optional, reason

TOLERANCE = 1e-4
"""Largest difference of an output, as a share of max(1, largest output)."""


def onnx_bytes(module: nn.Module, inputs: Tensor) -> bytes:
    """ONNX of `module` (in evaluation mode) for inputs like `inputs [batch, …]`, with free batch size and, for language, length.

    Parameters keep their names and their bits, zeros included; the graph is not rewritten (runtimes do that on loading). onnxruntime
    must give the module's outputs on `inputs`, on one row and, for language, on half their length: otherwise this is an error.
    """
    for name in ("onnxscript", "onnxruntime"):
        optional(name, "onnx")
    module = module.cpu().eval()
    language = _is_language(module, inputs)
    model = _converted(module, inputs, free_length=language)
    _check_weights(module, model)
    content: bytes = model.SerializeToString()
    _check_outputs(module, content, [inputs, inputs[:1], *([inputs[:, : max(1, inputs.shape[1] // 2)]] if language else [])])
    return content


def _is_language(module: nn.Module, inputs: Tensor) -> bool:
    """Are there logits `[batch, length, vocabulary]` for every token? Other whole numbers are categories in columns, all of them needed."""
    if inputs.is_floating_point():
        return False
    with torch.no_grad():
        output: Tensor = module(inputs)
    return output.dim() == 3 and output.shape[:2] == inputs.shape


def _converted(module: nn.Module, inputs: Tensor, free_length: bool) -> Any:
    """The module as an ONNX ModelProto, without the traces of this machine that the exporter leaves in it."""
    free: dict[int, Any] = {0: torch.export.Dim("batch")}
    if free_length:
        free[1] = torch.export.Dim("length", max=inputs.shape[1])
    with _quiet():
        try:
            program = torch.onnx.export(
                module,
                (torch.cat([inputs, inputs])[:3],),  # of one row the exporter would make a constant
                dynamo=True,
                dynamic_shapes=(free,),
                input_names=["input"],
                output_names=["output"],
                optimize=False,
                verbose=False,
            )
        except Exception as error:
            raise InputError(f"this model cannot be written as ONNX: {reason(error)}; use --format safetensors") from error
    assert program is not None
    model = program.model_proto
    for part in [*model.graph.node, *(node for function in model.functions for node in function.node)]:
        del part.metadata_props[:]  # stack traces with paths
    return model


def _check_weights(module: nn.Module, model: Any) -> None:
    """Is every parameter in the file as it is in the module? Tied ones stand there once."""
    to_array = optional("onnx.numpy_helper", "onnx").to_array
    written = {entry.name: to_array(entry) for entry in model.graph.initializer}
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tensor, called in names.items():
        if not any(name in written for name in called):
            continue  # the forward pass does not use it, which the outputs would show if it did
        if not any(name in written and np.array_equal(written[name], tensor.detach().numpy()) for name in called):
            raise InputError(f"the ONNX exporter changed the parameter {called[0]}: use --format safetensors")


def _check_outputs(module: nn.Module, content: bytes, batches: list[Tensor]) -> None:
    """Does onnxruntime compute what the module computes?"""
    runtime = optional("onnxruntime", "onnx")
    try:
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
        _compare(module, session, batches)
    except InputError:
        raise
    except Exception as error:  # onnxruntime has classes of its own for every kind
        raise InputError(f"onnxruntime cannot run this model: {reason(error)[:300]}; use --format safetensors") from error


def _compare(module: nn.Module, session: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        with torch.no_grad():
            wanted = module(batch).numpy()
        (given,) = session.run(None, {"input": batch.numpy()})
        difference = float(np.abs(given - wanted).max()) if given.shape == wanted.shape else float("inf")
        if not difference <= TOLERANCE * max(1.0, float(np.abs(wanted).max())):
            raise InputError(
                f"the ONNX file disagrees with the model by {difference:.3g} on inputs of shape {list(batch.shape)}: nothing was written; "
                "use --format safetensors"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks about packages that are not needed and functions of its own."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
