"""A decoder-only transformer small enough for tests, with the structure of GPT-2: tied embeddings, pre-norm, no dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrts.errors import InputError
from fedrts.models import register


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.ln_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers `[batch, time]` → logits `[batch, time, vocabulary]`."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.ln(self.blocks(self.tokens(tokens) + self.positions(place))))
        return logits


@register("tiny_gpt")
def tiny_gpt(input_shape: tuple[int, ...], classes: int, width: int = 32, layers: int = 2, heads: int = 4) -> nn.Module:
    """A GPT of about 30,000 parameters for token sequences; output and input embedding are one tensor."""
    if len(input_shape) != 1:
        raise InputError(f"model 'tiny_gpt' reads sequences of tokens, not inputs of shape {input_shape}")
    return TinyGPT(classes, input_shape[0], width, layers, heads)
