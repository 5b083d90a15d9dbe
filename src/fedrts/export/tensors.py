"""Named tensors without a program: safetensors, and a PyTorch state dict."""

from __future__ import annotations

import io

import safetensors.torch
import torch

from fedrts.export.formats import Format, Source, as_bytes, register


def _safetensors(source: Source) -> bytes:
    return safetensors.torch.save(source.tensors)


def _state_dict(source: Source) -> bytes:
    buffer = io.BytesIO()
    torch.save(source.tensors, buffer)
    return buffer.getvalue()


register("safetensors")(Format("named tensors, no code", ".safetensors", as_bytes(_safetensors)))
register("dense")(Format("a PyTorch state dict", ".pt", as_bytes(_state_dict)))
