"""Decoder-only transformers with the structure of GPT-2: pre-norm, tied embeddings, no dropout.

Tensors are named, shaped and initialised as in transformers' GPT2LMHeadModel, so that weights interchange. Sequences are padded on the
right: a causal model needs no mask for that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts.errors import InputError
from fedrts.models import checks, register


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over `[batch, heads, time, size]` that never stores the scores."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, written out so that it can be differentiated twice."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


ATTENTIONS = {"sdpa": fused_attention, "eager": eager_attention}


class Conv1D(nn.Module):
    """A linear layer whose weight is stored `[in, out]`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads = heads
        self.attention = attention
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        out: Tensor = self.c_proj(ATTENTIONS[self.attention](q, k, v).transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, attention)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(nn.Module):
    """Maps token numbers of any integer type to logits of the next token; input and output embedding are one tensor."""

    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int, attention: str) -> None:
        super().__init__()
        checks.counts(width=width, layers=layers, heads=heads)
        checks.one_of("attention", attention, ATTENTIONS)
        if width % heads:
            raise InputError(f"model_options.width = {width} must be a multiple of model_options.heads = {heads}")
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(positions, width),
                "h": nn.ModuleList(Block(width, heads, attention) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map token numbers `[batch, time]` to the input of the output matrix, `[batch, time, width]`."""
        if tokens.is_floating_point():
            raise TypeError(f"token numbers must be integers, not {tokens.dtype}")
        parts = self.transformer
        x = parts["wte"](tokens.long()) + parts["wpe"](torch.arange(tokens.shape[1], device=tokens.device))
        for block in parts["h"]:  # type: ignore[attr-defined]
            x = block(x)
        out: Tensor = parts["ln_f"](x)
        return out

    @property
    def output_matrix(self) -> Tensor:
        """The output matrix `[vocabulary, width]`."""
        return self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers `[batch, time]` to logits `[batch, time, vocabulary]`."""
        logits: Tensor = self.lm_head(self.hidden(tokens))
        return logits


@register("gpt2_32m")
def gpt2_32m(
    input_shape: tuple[int, ...],
    classes: int,
    width: int = 256,
    layers: int = 8,
    heads: int = 16,
    positions: int = 2048,
    attention: str = "sdpa",
) -> nn.Module:
    """The paper's GPT-2: 19.7 M parameters at 50,257 words ("32M" counts the tied matrix twice); attention "sdpa" or "eager"."""
    checks.counts(positions=positions)
    if (length := checks.tokens("gpt2_32m", input_shape)) > positions:
        raise InputError(f"model_options.positions = {positions} is too few for sequences of {length} tokens: raise it")
    return GPT2(classes, positions, width, layers, heads, attention)


@register("tiny_gpt")
def tiny_gpt(
    input_shape: tuple[int, ...], classes: int, width: int = 32, layers: int = 2, heads: int = 4, attention: str = "sdpa"
) -> nn.Module:
    """A GPT-2 of about 30,000 parameters for token sequences; attention "sdpa" or "eager"."""
    return GPT2(classes, checks.tokens("tiny_gpt", input_shape), width, layers, heads, attention)
