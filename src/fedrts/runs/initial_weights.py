"""Initial weights from a safetensors file: one of ours, or one exported from torchvision or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedrts.errors import InputError
from fedrts.files import require_plain

_PREFIX = "transformer."
"""transformers leaves it out where a model was saved without its head."""


_MASKS = (".attn.bias", ".attn.masked_bias")
"""Causal masks, which older exports of GPT-2 hold beside the weights."""


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Copy all tensors of the file into `module`; one of several tied names is enough."""
    take_weights(module, _read(path), path)


def take_weights(module: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """The same for tensors that were read from `path`."""
    own = module.state_dict()
    given = _named_as(own, tensors)
    missing = [name for name in own if name not in given and not _has_twin(name, own, given)]
    unknown = [name for name in given if name not in own]
    for names, problem in ((missing, "lacks"), (unknown, "has what the model has not:")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"init: '{path}' {problem} '{names[0]}'{more}; give a file of the same model and model_options")
    for name, tensor in ((name, given[name]) for name in own if name in given):  # a file has no order of its own
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}"
            raise InputError(f"init: '{name}' in '{path}' has shape {shapes}; give a file of the same model, classes and model_options")
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"init: '{name}' in '{path}' has values that are not finite: give another file")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _read(path: str | Path) -> dict[str, Tensor]:
    if Path(path).is_dir():
        raise InputError(f"init: '{path}' is a folder: name a safetensors file, such as the model.safetensors of a run")
    require_plain(path)
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise InputError(f"init: cannot read '{path}': {error.strerror or error}") from error
    except SafetensorError as error:
        raise InputError(
            f"init: '{path}' is no safetensors file ({error}); save one with safetensors.torch.save_file: pickled files are not loaded"
        ) from error


def _named_as(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file under the model's names."""
    named = {name if name in own or _PREFIX + name not in own else _PREFIX + name: tensor for name, tensor in given.items()}
    return {name: tensor for name, tensor in named.items() if name in own or not name.endswith(_MASKS)}


def _has_twin(name: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> bool:
    """Whether the tensor of that name is present under another name."""
    return any(other in given and own[other].data_ptr() == own[name].data_ptr() and own[other].shape == own[name].shape for other in own)
