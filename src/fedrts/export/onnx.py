"""ONNX export, checked against the module before it is delivered; 8-bit weights are also evaluated first."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrts.data.contract import Data
from fedrts.errors import InputError, note, optional, reason
from fedrts.export.formats import Answering, ExportFormat, TrainedModel, answering, as_bytes, checked_batches, is_language, register
from fedrts.tasks import declared
from fedrts.tasks.metrics import leading
from fedrts.wire.value_types import FORMATS

TOLERANCE = 1e-4
"""Largest difference of an output, as a share of max(1, largest output)."""
CALIBRATING = 256
"""Training samples from which the ranges of activations are taken."""


def onnx_bytes(module: nn.Module, inputs: Tensor) -> bytes:
    """ONNX of `module` (in evaluation mode) for inputs like `inputs [batch, …]`, with free batch size and, for language, length.

    Parameters keep their names and their bits, zeros included; the graph is not rewritten (runtimes do that on loading). onnxruntime
    must give the module's outputs on `inputs`, on one row and, for language, on half their length: otherwise this is an error.
    """
    for name in ("onnxscript", "onnxruntime"):
        optional(name, "onnx")
    module = answering(module, inputs)
    language = is_language(module, inputs)
    model = _converted(module, inputs, free_length=language)
    if isinstance(module, Answering):
        _rename(model, "module.")
    _check_weights(module.module if isinstance(module, Answering) else module, model)
    content: bytes = model.SerializeToString()
    _check_outputs(module, content, checked_batches(inputs, language))
    return content


def int8_bytes(content: bytes, inputs: Tensor, training: Tensor) -> bytes:
    """The same with weights of 8 bits, by onnxruntime: of models of whole numbers (tokens) matrix products alone, their activations as they
    come; of others everything, activations in ranges that they have on some `training` inputs."""
    optional("onnxruntime", "onnx")
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    rows = iter([{"input": part.numpy()} for part in training.split(len(inputs)) if len(part)])

    class Rows(quantization.CalibrationDataReader):  # type: ignore[misc]
        get_next = staticmethod(partial(next, rows, None))

    with tempfile.TemporaryDirectory() as scratch, _quiet(""):
        whole, small = Path(scratch, "whole.onnx"), Path(scratch, "small.onnx")
        try:
            inlined = optional("onnx.inliner", "onnx").inline_local_functions(optional("onnx", "onnx").load_from_string(content))
            quant_pre_process(inlined, str(whole), skip_symbolic_shape=True)
            if inputs.is_floating_point():
                form = {"quant_format": quantization.QuantFormat.QDQ, "per_channel": True, "weight_type": quantization.QuantType.QInt8}
                quantization.quantize_static(str(whole), str(small), Rows(), **form)
            else:
                quantization.quantize_dynamic(str(whole), str(small), weight_type=quantization.QuantType.QInt8)
            return small.read_bytes()
        except Exception as error:  # onnx and onnxruntime have classes of their own for every kind
            raise InputError(f"onnxruntime cannot make this model one of 8 bits: {reason(error)[:300]}; leave --value-type out") from error


class InSession(nn.Module):
    """An ONNX file as a module, by onnxruntime."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.session = _session(content)

    def forward(self, x: Tensor) -> Tensor:
        """Feed inputs to the file's `input` and return its `output`."""
        return torch.from_numpy(self.session.run(None, {"input": x.numpy()})[0])


def judged(content: bytes, small: bytes, held: Data, batch_size: int) -> str:
    """Describe in one line what 8 bits do to a model on the test set."""
    metric = leading(declared(held.task))
    before, after = (held.judge(InSession(form), held.test_x, held.test_y, batch_size)[metric.name] for form in (content, small))
    size = f"{len(small) / 1e6:.3g} MB instead of {len(content) / 1e6:.3g}"
    return f"int8: {metric.label} {metric.text(after)} on the test set, {metric.text(before)} without; {size}"


def _converted(module: nn.Module, inputs: Tensor, free_length: bool) -> Any:
    """Convert the module to an ONNX ModelProto, without the traces of this machine that the exporter leaves."""
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


def _rename(model: Any, prefix: str) -> None:
    """Rename parameters without the `prefix` of a wrapper around the module."""
    for entry in model.graph.initializer:
        entry.name = entry.name.removeprefix(prefix)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = name.removeprefix(prefix)


def _check_weights(module: nn.Module, model: Any) -> None:
    """Check that every parameter in the file equals the module's; tied ones appear once."""
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
    """Check that onnxruntime computes what the module computes."""
    try:
        _compare(module, _session(content), batches)
    except InputError:
        raise
    except Exception as error:  # onnxruntime has classes of its own for every kind
        raise InputError(f"onnxruntime cannot run this model: {reason(error)[:300]}; use --format safetensors") from error


def _session(content: bytes) -> Any:
    return optional("onnxruntime", "onnx").InferenceSession(content, providers=["CPUExecutionProvider"])


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
def _quiet(name: str = "torch.onnx") -> Iterator[None]:
    """Silence the exporter's remarks on unneeded packages, its own functions, and steps that were kept."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _exported(source: TrainedModel) -> bytes:
    """Export the model as ONNX, checked on the first test samples of the run's data."""
    content = onnx_bytes(source.model, source.inputs)
    if FORMATS[source.value_type].lossless:
        return content
    held = source.held
    small = int8_bytes(content, source.inputs, held.inputs(held.x[:CALIBRATING]))
    note(judged(content, small, held, source.experiment.eval.batch_size))
    return small


register("onnx")(ExportFormat("a program for any ONNX runtime", ".onnx", as_bytes(_exported), ("float32", "int8")))
