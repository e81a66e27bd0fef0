"""LSTM language model (Zaremba, Sutskever and Vinyals 2014): embedding, LSTM layers, and a linear layer on top.

Index legend: ``b`` texts, ``t`` tokens, ``n`` layers, ``h`` width, ``v`` vocabulary. The gates are linear layers and
not ``nn.LSTM``, whose weights are used where no hook sees them, so that each weight's gradient is a product of factors.
"""

import torch
from torch import Tensor, nn

from models.shape import Shape


class Layer(nn.Module):
    """One LSTM layer of equal input and hidden width; gates in torch's order: input, forget, cell, output.

    The gates' part from the inputs is one product over all tokens, and carries the bias; that from h is one a token.

    Args:
        width: h.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)  # as nn.LSTM

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input [b, t, h] and hidden and cell state [b, h] to all outputs [b, t, h] and the last states."""
        outputs = []
        for gates in self.inputs(x).unbind(1):
            i, f, g, o = (gates + self.hidden(h)).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1), h, c


class LSTMLanguageModel(nn.Module):
    """See :func:`lstm_lm`."""

    def __init__(self, vocabulary: int, width: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens [b, t] int64 to logits [b, t, v] and the state to go on from.

        Args:
            tokens: the texts.
            state: [2, n, b, h], hidden and cell, as returned for the tokens before; zeros where there were none.
        """
        x = self.embedding(tokens)
        if state is None:
            state = x.new_zeros(2, len(self.layers), len(tokens), x.shape[-1])
        after = []
        for layer, h, c in zip(self.layers, *state, strict=True):
            x, h, c = layer(x, h, c)
            after.append(torch.stack([h, c]))
        return self.head(x), torch.stack(after, 1)


def lstm_lm(
    classes: int, in_shape: Shape, *, width: int = 200, layers: int = 2, tied: bool = False
) -> LSTMLanguageModel:
    """([b, t], state) -> ([b, t, classes], state).

    Args:
        classes: size of the vocabulary.
        in_shape: (t,); any length.
        width: of the embedding and of every layer; the paper has 200, 650 and 1500.
        layers: number of LSTM layers.
        tied: use the embedding's table as the last layer's weight, too (Press and Wolf 2017).
    """
    return LSTMLanguageModel(classes, width, layers, tied)
