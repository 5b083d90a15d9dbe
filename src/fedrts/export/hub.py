"""A folder for transformers' `from_pretrained`, with a model card, checked against the model before it is delivered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrts import config, trees
from fedrts.errors import InputError, reason
from fedrts.export.card import card
from fedrts.export.formats import ExportFormat, TrainedModel, register
from fedrts.files import require_plain
from fedrts.models import models, pretrained
from fedrts.models.gpt2 import GPT2

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
"""Files of the folder that a run began from: the tokenizer."""


def _write(source: TrainedModel, folder: Path) -> None:
    module = _module(source)
    kind = type(module).__name__
    try:
        with pretrained.alone():
            module.save_pretrained(folder)
            again = type(module).from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    except Exception as error:  # transformers has many
        raise InputError(f"transformers cannot write this {kind}: {reason(error)}; use --format safetensors") from error
    _check(source, module, again.eval())
    if models.is_path(source.experiment.model):
        for name in _TOKENIZER:
            file = Path(source.experiment.model.partition(":")[2], name)
            if file.is_file():
                shutil.copyfile(file, folder / name)
    use = f'from transformers import {kind}\n\nmodel = {kind}.from_pretrained("FOLDER")'
    (folder / "README.md").write_text(card(source.folder, source.experiment, use), "utf-8")


def _module(source: TrainedModel) -> Any:
    """Return the run's model as a transformers model."""
    file = source.path / pretrained.CONFIG
    if file.exists():
        require_plain(file)
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot read {file}: {error}; restore it") from error
        module = pretrained.built(pretrained.read(content, str(file)), "auto", "sdpa")
    elif source.experiment.model != config.CUSTOM and isinstance(source.model, GPT2):
        module = _as_gpt2(source.model)
    else:
        raise InputError(f"the run in {source.path} trained no model of transformers (nor a GPT-2): use --format safetensors")
    try:
        module.load_state_dict(source.tensors, strict=True)
    except RuntimeError as error:
        raise InputError(f"the tensors of {source.path} are not those of its {pretrained.CONFIG}: {reason(error)}") from error
    return module.eval()


def _as_gpt2(module: GPT2) -> nn.Module:
    """Convert our GPT-2 to transformers' GPT-2, which has the same tensor names."""
    parts: Any = module.transformer
    words, width = parts["wte"].weight.shape
    sizes = {"vocab_size": words, "n_embd": width, "n_positions": len(parts["wpe"].weight), "n_layer": len(parts["h"])}
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    facts = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_head": parts["h"][0].attn.heads, **sizes, **still}
    return pretrained.built(pretrained.read(facts, "this GPT-2"), "auto", "sdpa")


def _check(source: TrainedModel, module: nn.Module, again: nn.Module) -> None:
    """Check that the folder's tensors equal the run's bit for bit, and that its outputs are the model's."""
    written = again.state_dict()
    for name, tensor in module.state_dict().items():
        if name not in written or not torch.equal(written[name], tensor):
            raise InputError(f"'{name}' did not come back from the folder as it was: nothing was written; use --format safetensors")
    own = source.experiment.data == config.CUSTOM
    reference, inputs = (module, module.dummy_inputs) if own else (source.model, source.inputs)
    with torch.no_grad():
        wanted, given = (trees.answer(trees.called(model, inputs)) for model in (reference, again))
    if isinstance(wanted, Tensor) and not torch.allclose(given, wanted, rtol=1e-4, atol=1e-5):
        raise InputError("the folder's model gives other outputs than the run's: nothing was written; use --format safetensors")


register("transformers")(ExportFormat("a folder for from_pretrained", "", _write))
