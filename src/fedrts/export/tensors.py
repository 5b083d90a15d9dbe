"""Named tensors without a program: safetensors, and a PyTorch state dict."""

from __future__ import annotations

import io

import safetensors.torch
import torch

from fedrts.export.formats import ExportFormat, TrainedModel, as_bytes, register


def _safetensors(source: TrainedModel) -> bytes:
    return safetensors.torch.save(source.tensors)


def _state_dict(source: TrainedModel) -> bytes:
    buffer = io.BytesIO()
    torch.save(source.tensors, buffer)
    return buffer.getvalue()


register("safetensors")(ExportFormat("named tensors, no code", ".safetensors", as_bytes(_safetensors)))
register("dense")(ExportFormat("a PyTorch state dict", ".pt", as_bytes(_state_dict)))
