"""Decoder-only transformer language model: causal attention, normalisation first, as GPT-2 (Radford et al. 2019).

Index legend: ``b`` texts, ``t`` tokens, ``a`` heads, ``e`` width of a head, ``h`` width, ``v`` vocabulary. Attention's
projections are linear layers and not ``nn.MultiheadAttention``, whose weights are used where no hook sees them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.shape import ModelError, Shape


class Attention(nn.Module):
    """[b, t, h] -> [b, t, h], each token a mean over itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Queries, keys and values from one projection."""
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [b, a, t, e]
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """[b, t, h] -> [b, t, h]: attention, then two dense layers, each on normalised input and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream."""
        x = x + self.attention(x)
        return x + self.dense(x)  # type: ignore[no-any-return]


class TransformerLanguageModel(nn.Module):
    """See :func:`transformer_lm`."""

    def __init__(self, vocabulary: int, steps: int, width: int, layers: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(steps, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.normalize = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: None = None) -> tuple[Tensor, None]:
        """Tokens [b, t] int64, t at most the length it was built for, to logits [b, t, v]; there is no state."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(places)
        return self.head(self.normalize(self.blocks(x))), None


def transformer_lm(
    classes: int, in_shape: Shape, *, width: int = 128, layers: int = 2, heads: int = 4, tied: bool = False
) -> TransformerLanguageModel:
    """([b, t], None) -> ([b, t, classes], None).

    Args:
        classes: size of the vocabulary.
        in_shape: (t,), the longest text that it can take.
        width: h, of the residual stream; dense layers are four times as wide inside.
        layers: number of blocks.
        heads: of attention, in each block.
        tied: use the embedding's table as the last layer's weight, too.

    Raises:
        ModelError: the heads cannot share the width equally.
    """
    if width % heads:
        raise ModelError(f"transformer_lm: width={width} cannot be shared equally by heads={heads}")
    [steps] = in_shape
    return TransformerLanguageModel(classes, steps, width, layers, heads, tied)
