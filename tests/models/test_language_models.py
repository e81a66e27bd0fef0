"""Language models: parameter counts of the papers, equal to torch's layers, causal, and they go on where they were."""

import pytest
import torch
from torch import Tensor, nn

import models
from models import lstm_lm, transformer_lm

V, T, H = 50, 6, 8


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def lstm(v: int, h: int, layers: int) -> int:
    return v * h + layers * (2 * h * 4 * h + 4 * h) + h * v + v


def transformer(v: int, t: int, h: int, layers: int) -> int:
    norm, attention, dense = 2 * h, (h + 1) * 3 * h + (h + 1) * h, (h + 1) * 4 * h + (4 * h + 1) * h
    return v * h + t * h + layers * (2 * norm + attention + dense) + norm + h * v


def build(spec: str, seed: int = 0) -> nn.Module:
    return models.build(spec, classes=V, in_shape=(T,), seed=seed)


def tokens(seed: int = 0, steps: int = T) -> Tensor:
    return torch.randint(V, (3, steps), generator=torch.Generator().manual_seed(seed))


COUNTS = {
    "lstm_lm": lstm(V, 200, 2),
    "lstm_lm:width=8": lstm(V, 8, 2),
    "lstm_lm:width=8,layers=3,tied=true": lstm(V, 8, 3) - 8 * V,
    "transformer_lm": transformer(V, T, 128, 2),
    "transformer_lm:width=8,layers=3,heads=2": transformer(V, T, 8, 3),
    "transformer_lm:width=8,tied=true": transformer(V, T, 8, 2) - 8 * V,
}


@pytest.mark.parametrize("spec", COUNTS)
def test_parameter_count_and_output(spec: str) -> None:
    model = build(spec)
    assert count(model) == COUNTS[spec]
    logits, _ = model(tokens())
    assert logits.shape == (3, T, V)


def test_counts_are_those_of_the_papers() -> None:
    """Zaremba's medium and large LSTM have 20 and 66 million, GPT-2 small 124,439,808; without the memory for them."""
    with torch.device("meta"):
        assert round(count(lstm_lm.lstm_lm(10_000, (35,), width=650)) / 1e6) == 20
        assert round(count(lstm_lm.lstm_lm(10_000, (35,), width=1500)) / 1e6) == 66
        small = transformer_lm.transformer_lm(50_257, (1024,), width=768, layers=12, heads=12, tied=True)
    assert count(small) == 124_439_808


def test_the_lstm_is_torchs() -> None:
    model = build(f"lstm_lm:width={H}")
    theirs = nn.LSTM(H, H, num_layers=2, batch_first=True)
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            getattr(theirs, f"weight_ih_l{i}").copy_(layer.inputs.weight)
            getattr(theirs, f"weight_hh_l{i}").copy_(layer.hidden.weight)
            getattr(theirs, f"bias_ih_l{i}").copy_(layer.inputs.bias)
            getattr(theirs, f"bias_hh_l{i}").zero_()
    state = torch.randn(2, 2, 3, H, generator=torch.Generator().manual_seed(1))
    logits, after = model(tokens(), state)
    expected, last = theirs(model.embedding(tokens()), tuple(state))
    torch.testing.assert_close(logits, model.head(expected))
    torch.testing.assert_close(after, torch.stack(last))


def test_the_lstm_goes_on_where_it_was() -> None:
    model = build(f"lstm_lm:width={H}")
    whole, last = model(tokens())
    first, state = model(tokens()[:, :2])
    second, after = model(tokens()[:, 2:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(after, last)


def test_the_attention_is_torchs() -> None:
    block = build(f"transformer_lm:width={H},heads=2").blocks[0]
    ours = block.attention[1]
    theirs = nn.MultiheadAttention(H, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.project.weight)
        theirs.in_proj_bias.copy_(ours.project.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(3, T, H, generator=torch.Generator().manual_seed(1))
    later = torch.ones(T, T).triu(1).bool()
    torch.testing.assert_close(ours(x), theirs(x, x, x, attn_mask=later, need_weights=False)[0])


@pytest.mark.parametrize("spec", ["lstm_lm:width=8", "transformer_lm:width=8"])
def test_no_token_sees_a_later_one(spec: str) -> None:
    model, x = build(spec), tokens()
    other = x.clone()
    other[:, 4:] = (x[:, 4:] + 1) % V
    before, after = model(x)[0], model(other)[0]
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


@pytest.mark.parametrize("spec", ["lstm_lm:width=8", "transformer_lm:width=8"])
def test_tied_models_have_one_table(spec: str) -> None:
    model = build(f"{spec},tied=true")
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("spec", ["lstm_lm:width=8", "transformer_lm:width=8"])
def test_seed_decides_the_weights(spec: str) -> None:
    first, again, other = build(spec, 1), build(spec, 1), build(spec, 2)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


REFUSED = {
    "fc": "fc takes images, not texts; for those choose one of: lstm_lm, transformer_lm",
    "transformer_lm:width=6": "width=6 cannot be shared equally by heads=4",
    "transformer_lm:tied=1": "'tied=1' of model 'transformer_lm' must be true or false",
    "lstm_lm:width=0": "must be 1 or more",
    "lstm_lm:heads=2": "no option 'heads=2'; write option=value with: width, layers, tied",
    "lstm_lm:init=authors": "no option 'init=authors'",
}


@pytest.mark.parametrize(("spec", "message"), REFUSED.items(), ids=REFUSED)
def test_refused(spec: str, message: str) -> None:
    with pytest.raises(models.ModelError, match=message):
        build(spec)


def test_images_are_refused() -> None:
    with pytest.raises(models.ModelError, match="lstm_lm takes texts, not images; for those choose one of: fc, lenet"):
        models.build("lstm_lm", classes=10, in_shape=(1, 28, 28))
