"""Models of transformers: from a folder on this machine, `--model hf:FOLDER`, or as objects in Python.

Nothing is downloaded, no code of a folder is run, and nothing is unpickled: a folder gives a configuration (`config.json`) of a kind that
the installed transformers knows, and tensors (`*.safetensors`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrts import trees
from fedrts.data.contract import Data
from fedrts.errors import InputError, note, optional, reason
from fedrts.files import require_plain
from fedrts.models import register
from fedrts.sparse.layout import Prunable, default_rule, output_layer

CONFIG = "config.json"
_MOST = 2**24
"""Bytes of a configuration at most."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_HEADS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "image_classification": "AutoModelForImageClassification",
}
_LABELS = ("sequence_classification", "token_classification", "image_classification")
_ATTENTIONS = ("auto", "sdpa", "eager")
_DROPPED = ("auto_map", "_attn_implementation", "attn_implementation", "attn_implementation_internal", "_attn_implementation_internal")
"""Keys of a configuration that name code elsewhere; what they name is never looked for."""
_REFUSED = {"quantization_config": "a quantised model, which cannot be trained", "use_pretrained_backbone": "a model with a part elsewhere"}
"""Keys that may not be set."""


@register("hf:PATH")
def from_folder(
    folder: Path, input_shape: tuple[int, ...], classes: int, head: str = "auto", attention: str = "auto", **options: Any
) -> nn.Module:
    """Any model of transformers: config.json (random weights) and safetensors, if there are any; other options are keys of the config."""
    config = _config(folder, options)
    head = _fitting(config, input_shape) if head == "auto" else head
    if head in _LABELS:
        config.num_labels = classes
    module = built(config, head, attention, folder)
    _check_sizes(config, input_shape, classes, head)
    return module


def from_python(given: object) -> nn.Module:
    """Make a model for `fedrts.train` from `hf:FOLDER`, or from a transformers configuration that names its `architectures`."""
    if isinstance(given, str) and given.startswith("hf:"):
        folder = Path(given.removeprefix("hf:")).expanduser()
        return built(_config(folder, {}), "auto", "auto", folder)
    if isinstance(given, str) or not hasattr(given, "to_json_string"):
        raise InputError(
            f"model is {given!r}: give a torch.nn.Module, hf:FOLDER or a configuration of transformers (models by name are for fedrts.run)"
        )
    return built(given, "auto", "auto")


def built(config: Any, head: str, attention: str, folder: Path | None = None) -> nn.Module:
    """Build the model of a configuration, with a folder's tensors if there are any.

    `head` "auto" follows `architectures`; `attention` "auto" is sdpa where a model has it.
    """
    kind = _class(config, head, folder)
    if attention not in _ATTENTIONS:
        raise InputError(f"model_options.attention must be {' or '.join(map(repr, _ATTENTIONS))} (got {attention!r})")
    if attention == "auto":
        attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    usual = {"dtype": torch.float32, "attn_implementation": attention}
    try:
        with alone():
            if folder is None or not _has_weights(folder):
                module: nn.Module = kind._from_config(config, **usual)
                return module
            module, found = kind.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **usual,
            )
    except InputError:
        raise
    except Exception as error:  # transformers has many
        raise InputError(f"transformers cannot build {kind.__name__}{f' from {folder}' if folder else ''}: {reason(error)}") from error
    fresh = sorted({*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])})
    if fresh:
        note(f"{folder} has no tensors for {_some(fresh)}: {'they begin' if len(fresh) > 1 else 'it begins'} at random")
    if found["unexpected_keys"]:
        note(f"of the tensors in {folder} {_some(sorted(found['unexpected_keys']))} are left out: {kind.__name__} has no such tensors")
    module.pretrained = True  # type: ignore[assignment]
    return module


def is_pretrained_model(module: object) -> bool:
    """Whether it is a transformers model; the package need not be installed."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)


def blocks_rule(module: nn.Module, prune_output: bool = False) -> Prunable | None:
    """Return the rule for what may be pruned of a transformers model: linear layers and convolutions in its blocks.

    Embeddings, norms, poolers and heads are not, nor what is tied to an embedding; `prune_output` adds the output layer. What is around
    it goes by the usual rule. None: there is no such model.
    """
    parts = [part for part in module.modules() if is_pretrained_model(part)]
    if not parts:
        return None
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    links = {id(layer.weight) for part in parts for layer in _in_blocks(part) if isinstance(getattr(layer, "weight", None), Tensor)}
    links -= {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    links -= {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
    if prune_output and (output := output_layer(module)) is not None:
        links |= {id(parameter) for parameter in output.parameters() if parameter.dim() > 1 and parameter.requires_grad}
    usual = default_rule(module, prune_output)
    return lambda name, parameter: id(parameter) in links if id(parameter) in inside else usual(name, parameter)


def _in_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Return the linear layers and convolutions that lie in lists of blocks."""
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            for part in blocks.modules():
                if isinstance(part, nn.Linear | nn.modules.conv._ConvNd) or type(part).__name__ == "Conv1D":  # the latter is GPT-2's
                    yield part


def bare(module: nn.Module) -> nn.Module:
    """Return the model that PEFT has put adapters on, or the module itself."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") and hasattr(module, "peft_config") else module  # type: ignore[operator]
    return inner if isinstance(inner, nn.Module) else module


def with_decoder_inputs(module: nn.Module, held: Data) -> Data:
    """Return data for a transformers model: those with an encoder and a decoder need `decoder_input_ids`, made of the labels as there."""
    inner, name = bare(module), "decoder_input_ids"
    shifted = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    wanting = isinstance(held.x, dict) and name not in held.x and isinstance(held.y, Tensor) and isinstance(held.test_y, Tensor)
    if not (is_pretrained_model(inner) and getattr(inner.config, "is_encoder_decoder", False) and callable(shifted) and wanting):
        return held
    return replace(held, x={**held.x, name: shifted(labels=held.y)}, test_x={**held.test_x, name: shifted(labels=held.test_y)})


def task_name(module: nn.Module, targets: trees.Tensors) -> str | None:
    """Return the task for which a transformers model takes a label per token; None: another task."""
    module = bare(module)
    if not is_pretrained_model(module) or not isinstance(targets, Tensor) or targets.dim() != 2 or targets.is_floating_point():
        return None
    name = type(module).__name__
    return "language" if name.endswith(("ForCausalLM", "LMHeadModel")) else "tokens"


def written(module: nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a transformers model, with its class; None for other models."""
    if not is_pretrained_model(module):
        return None
    config: dict[str, Any] = json.loads(module.config.to_json_string())  # type: ignore[operator, union-attr]
    return {**config, "architectures": [type(module).__name__]}


def read(content: Mapping[str, Any], where: str) -> Any:
    """Build the configuration object of a `config.json`, by a class of the installed transformers."""
    transformers = optional("transformers", "text")
    if "auto_map" in content and content.get("model_type") not in transformers.CONFIG_MAPPING:
        raise InputError(f"{where} is of a model with code of its own, which is not run: load it in Python if you trust it")
    if (key := next((key for key in _REFUSED if _set(content, key)), None)) is not None:
        raise InputError(f"{where} is of {_REFUSED[key]} ({key}): take another")
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"{where} has model_type = {kind!r}, which transformers {transformers.__version__} does not know")
    try:
        with alone():
            return transformers.CONFIG_MAPPING[kind].from_dict(_without_dropped(content))
    except Exception as error:
        raise InputError(f"{where} is no configuration of a {kind}: {reason(error)}") from error


def _without_dropped(content: Any) -> Any:
    """Return a configuration, including nested ones, without the keys that name foreign code."""
    if not isinstance(content, Mapping):
        return content
    return {key: _without_dropped(value) for key, value in content.items() if key not in _DROPPED}


def _set(content: Any, key: str) -> bool:
    """Whether the key has a value in a configuration or a nested one."""
    return isinstance(content, Mapping) and (bool(content.get(key)) or any(_set(value, key) for value in content.values()))


def _config(folder: Path, options: Mapping[str, Any]) -> Any:
    """Read the configuration in a folder; `options` override its keys."""
    if not folder.is_dir():
        raise InputError(
            f"--model hf:{folder}: there is no such folder, and nothing is downloaded: save a model there first (save_pretrained)"
        )
    file = folder / CONFIG
    require_plain(file)
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds adapters of PEFT: load them onto their base in Python, and give that to fedrts.train")
    try:
        if file.stat().st_size > _MOST:
            raise InputError(f"{file} has more than {_MOST:,} bytes: it is no configuration")
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"{folder} holds no model of transformers: cannot read {CONFIG} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} is no configuration of transformers: it holds no table")
    config = read(content, str(file))
    known = {*config.to_dict(), *getattr(config, "attribute_map", {})}
    for key, value in options.items():
        if key not in known or key in (*_DROPPED, *_REFUSED):
            raise InputError(f"unknown key 'model_options.{key}': {file} has no such key (nor is it head or attention)")
        setattr(config, key, value)
    return config


def _has_weights(folder: Path) -> bool:
    """Whether there are tensors; pickled ones are refused."""
    if any(folder.glob("*.safetensors")):
        return True
    if pickled := sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLED):
        raise InputError(f"{folder} has its weights in {pickled[0]}, which is pickled and not read: save them as safetensors first")
    return False


def _class(config: Any, head: str, folder: Path | None) -> Any:
    """Return the class to build."""
    transformers = optional("transformers", "text")
    if head == "auto":
        name = next(iter(config.architectures or ()), None)
        if name is None:
            raise InputError(
                f"{folder / CONFIG if folder else type(config).__name__} names no architectures: give them, such as "
                "architectures=['BertForSequenceClassification'], or the model itself"
            )
        kind = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            raise InputError(f"architectures = [{name!r}] is no model that transformers {transformers.__version__} has")
        return kind
    if head not in _HEADS:
        raise InputError(f"model_options.head must be auto, {', '.join(_HEADS)} (got {head!r})")
    mapping = getattr(transformers, _HEADS[head])._model_mapping
    try:
        return mapping[type(config)]
    except KeyError as error:
        raise InputError(f"transformers has no {config.model_type} for model_options.head = '{head}'") from error


def _fitting(config: Any, input_shape: tuple[int, ...]) -> str:
    """Return the default head: the one saved in the folder, or else one that fits the inputs."""
    if config.architectures:
        name = str(config.architectures[0])
        ends = {"ForSequenceClassification": "sequence_classification", "ForTokenClassification": "token_classification"}
        ends |= {"ForImageClassification": "image_classification"}
        return next((head for end, head in ends.items() if name.endswith(end)), "auto")
    return "image_classification" if len(input_shape) == 3 else "causal_lm"


def _check_sizes(config: Any, input_shape: tuple[int, ...], classes: int, head: str) -> None:
    """Check that the model has room for these inputs."""
    words, positions = (getattr(config, key, None) for key in ("vocab_size", "max_position_embeddings"))
    if len(input_shape) != 1:
        return
    if head not in _LABELS and isinstance(words, int) and words < classes:
        raise InputError(
            f"the model has {words:,} words and the data {classes:,}: set model_options.vocab_size = {classes} (random weights)"
        )
    if isinstance(positions, int) and 0 < positions < input_shape[0]:
        raise InputError(
            f"the model has {positions:,} positions, too few for sequences of {input_shape[0]:,} tokens: shorten them (data_options.length)"
        )


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Silence transformers' messages and progress bars, and block network access."""
    logging = optional("transformers", "text").utils.logging
    hub = optional("huggingface_hub.constants", "text")
    level, bars, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
