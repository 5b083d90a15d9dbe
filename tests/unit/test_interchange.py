"""Weights go to torchvision and transformers and come back: the same names, shapes and, for transformers, logits."""

import math

import pytest
import torch

from fedrts import models
from fedrts.errors import InputError
from fedrts.runs.initial_weights import load_weights


def shapes(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def norm(name, channels, statistics=True):
    entries: dict[str, tuple[int, ...]] = {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}
    if statistics:
        entries |= {f"{name}.running_mean": (channels,), f"{name}.running_var": (channels,), f"{name}.num_batches_tracked": ()}
    return entries


def resnet_names(widths, stem, statistics, classes):
    """The layout of torchvision's `resnet18`, by rule."""
    names = {"conv1.weight": (widths[0], 3, stem, stem), **norm("bn1", widths[0], statistics)}
    before = widths[0]
    for stage, width in enumerate(widths, 1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            names |= {f"{name}.conv1.weight": (width, before, 3, 3), **norm(f"{name}.bn1", width, statistics)}
            names |= {f"{name}.conv2.weight": (width, width, 3, 3), **norm(f"{name}.bn2", width, statistics)}
            if before != width:
                names |= {f"{name}.downsample.0.weight": (width, before, 1, 1), **norm(f"{name}.downsample.1", width, statistics)}
            before = width
    return names | {"fc.weight": (classes, before), "fc.bias": (classes,)}


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_names_of_resnets(kind):
    statistics = kind == "batch"
    large = (64, 128, 256, 512)
    assert shapes(models.get("resnet18")((3, 32, 32), 7, norm=kind)) == resnet_names(large, 7, statistics, 7)
    assert shapes(models.get("resnet18")((3, 32, 32), 7, stem="cifar", norm=kind)) == resnet_names(large, 3, statistics, 7)
    assert shapes(models.get("resnet18_small")((3, 32, 32), 7, norm=kind)) == resnet_names((16, 32, 64), 3, statistics, 7)


@pytest.mark.parametrize(("width", "channels"), [(0.5, (48, 96, 192)), (1.0, (116, 232, 464))])
def test_names_of_shufflenet(width, channels):
    """The layout of torchvision's `shufflenet_v2_x0_5` and `_x1_0`, by rule."""
    names = {"conv1.0.weight": (24, 3, 3, 3), **norm("conv1.1", 24)}
    before = 24
    for stage, (out, repeats) in enumerate(zip(channels, (4, 8, 4), strict=True), 2):
        half = out // 2
        for unit in range(repeats):
            name, entering = f"stage{stage}.{unit}", before if unit == 0 else half
            if unit == 0:
                names |= {f"{name}.branch1.0.weight": (before, 1, 3, 3), **norm(f"{name}.branch1.1", before)}
                names |= {f"{name}.branch1.2.weight": (half, before, 1, 1), **norm(f"{name}.branch1.3", half)}
            names |= {f"{name}.branch2.0.weight": (half, entering, 1, 1), **norm(f"{name}.branch2.1", half)}
            names |= {f"{name}.branch2.3.weight": (half, 1, 3, 3), **norm(f"{name}.branch2.4", half)}
            names |= {f"{name}.branch2.5.weight": (half, half, 1, 1), **norm(f"{name}.branch2.6", half)}
        before = out
    names |= {"conv5.0.weight": (1024, before, 1, 1), **norm("conv5.1", 1024), "fc.weight": (7, 1024), "fc.bias": (7,)}
    assert shapes(models.get("shufflenet_v2")((3, 32, 32), 7, width=width)) == names


def test_names_of_gpt2():
    """The layout of transformers' GPT2LMHeadModel at the paper's size, by rule."""
    width = 256
    names: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (50257, width), "transformer.wpe.weight": (2048, width)}
    for block in range(8):
        name = f"transformer.h.{block}"
        names |= norm(f"{name}.ln_1", width, False) | norm(f"{name}.ln_2", width, False)
        for part, (inputs, outputs) in {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}.items():
            names |= {f"{name}.{part}.weight": (inputs * width, outputs * width), f"{name}.{part}.bias": (outputs * width,)}
    names |= {**norm("transformer.ln_f", width, False), "lm_head.weight": (50257, width)}
    assert shapes(models.get("gpt2_32m")((256,), 50257)) == names


# -- transformers itself ----------------------------------------------------------------------------------------------

OPTIONS = {"width": 32, "layers": 3, "heads": 4, "positions": 24}
WORDS = 61


def theirs(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24}
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**size, **still, **changes})).eval()


def ours(attention="sdpa"):
    return models.get("gpt2_32m")((20,), WORDS, **OPTIONS, attention=attention)


def unlike_the_start(module):
    """Every tensor random: norms and biases too, so that each matters."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    return module


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_those_of_transformers_both_ways(attention):
    tokens = torch.randint(0, WORDS, (3, 20))
    source, target = unlike_the_start(theirs()), ours(attention)
    assert shapes(source) == shapes(target)
    target.load_state_dict(source.state_dict(), strict=True)
    torch.testing.assert_close(target(tokens), source(tokens).logits, rtol=1e-5, atol=1e-5)
    back = theirs()
    back.load_state_dict(unlike_the_start(target).state_dict(), strict=True)
    torch.testing.assert_close(target(tokens), back(tokens).logits, rtol=1e-5, atol=1e-5)


def test_right_padding_needs_no_mask():
    tokens = torch.randint(1, WORDS, (2, 20))
    padded = tokens.clone()
    padded[:, 15:] = 0
    source, target = unlike_the_start(theirs()), ours()
    target.load_state_dict(source.state_dict())
    expected = source(padded, attention_mask=(padded != 0).long()).logits
    torch.testing.assert_close(target(padded)[:, :15], expected[:, :15], rtol=1e-5, atol=1e-5)


def test_files_of_transformers_are_read(tmp_path):
    source, target = unlike_the_start(theirs()), ours()
    source.save_pretrained(tmp_path)
    load_weights(target, tmp_path / "model.safetensors")
    tokens = torch.randint(0, WORDS, (3, 20))
    torch.testing.assert_close(target(tokens), source(tokens).logits, rtol=1e-5, atol=1e-5)
    source.transformer.save_pretrained(tmp_path / "body")
    again = ours()
    load_weights(again, tmp_path / "body" / "model.safetensors")
    assert torch.equal(again(tokens), target(tokens))


def test_the_paper_model_counts_as_in_transformers():
    def sizes(module):
        return {name: (tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()}

    with torch.device("meta"):
        whole = theirs(vocab_size=50257, n_embd=256, n_layer=8, n_head=16, n_positions=2048)
        assert sizes(models.get("gpt2_32m")((256,), 50257)) == sizes(whole)


# -- initialisation ---------------------------------------------------------------------------------------------------


def test_gpt2_is_initialised_like_transformers():
    torch.manual_seed(0)
    model = models.get("gpt2_32m")((16,), 400, width=64, layers=4, heads=4, positions=64)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            wanted = 0.02 / math.sqrt(8) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.1 * wanted, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_resnets_are_initialised_like_torchvision(kind):
    torch.manual_seed(0)
    for name, parameter in models.get("resnet18")((3, 32, 32), 10, norm=kind).named_parameters():
        if parameter.dim() == 4:
            out, _, height, width = parameter.shape
            assert parameter.std().item() == pytest.approx(math.sqrt(2 / (out * height * width)), rel=0.05), name
        elif not name.startswith("fc"):
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


# -- what cannot be built ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "resnet18", "resnet18_small", "shufflenet_v2"])
@pytest.mark.parametrize("shape", [(), (64,), (8, 8), (1, 3, 8, 8), (3, 0, 8)])
def test_models_of_images_want_images(name, shape):
    with pytest.raises(InputError, match=f"model '{name}' reads images.*choose another --model") as caught:
        models.get(name)(shape, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt2_32m", "tiny_gpt"])
@pytest.mark.parametrize("shape", [(), (3, 8), (3, 8, 8), (0,)])
def test_models_of_language_want_tokens(name, shape):
    with pytest.raises(InputError, match=f"model '{name}' reads sequences of tokens.*choose another --model") as caught:
        models.get(name)(shape, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet18", (3, 8, 8), {"stem": "large"}, "model_options.stem must be 'imagenet' or 'cifar' (got 'large')"),
        ("resnet18", (3, 8, 8), {"norm": "none"}, "model_options.norm must be 'batch' or 'group' (got 'none')"),
        ("resnet18_small", (3, 8, 8), {"norm": 3}, "model_options.norm must be 'batch' or 'group' (got 3)"),
        ("shufflenet_v2", (3, 8, 8), {"width": 2.0}, "model_options.width must be 0.5 or 1.0 (got 2.0)"),
        ("gpt2_32m", (8,), {"heads": 7}, "model_options.width = 256 must be a multiple of model_options.heads = 7"),
        ("gpt2_32m", (8,), {"heads": 0}, "model_options.heads must be a whole number ≥ 1 (got 0)"),
        ("gpt2_32m", (8,), {"layers": 1.5}, "model_options.layers must be a whole number ≥ 1 (got 1.5)"),
        ("gpt2_32m", (8,), {"positions": "many"}, "model_options.positions must be a whole number ≥ 1 (got 'many')"),
        ("gpt2_32m", (3000,), {}, "model_options.positions = 2048 is too few for sequences of 3000 tokens: raise it"),
        ("gpt2_32m", (8,), {"attention": "flash"}, "model_options.attention must be 'sdpa' or 'eager' (got 'flash')"),
        ("tiny_gpt", (8,), {"width": 30}, "model_options.width = 30 must be a multiple of model_options.heads = 4"),
    ],
)
def test_options_that_make_no_model(name, shape, options, message):
    with pytest.raises(InputError) as caught:
        models.get(name)(shape, 10, **options)
    assert str(caught.value) == message


def test_numbers_that_are_no_tokens():
    with pytest.raises(TypeError, match="integers"):
        ours()(torch.rand(2, 5))
