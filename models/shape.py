"""Shapes of one input, and the error of this package."""

Shape = tuple[int, ...]  # channels, rows, columns of an image; number of tokens of a text


class ModelError(ValueError):
    """An unknown model, an unknown option, or an input that a model cannot take; the message lists what is allowed."""


def require(model: str, in_shape: Shape, wanted: str, fits: bool) -> None:
    """Refuse images that a model cannot take.

    Raises:
        ModelError: ``fits`` is false; the message says what is wanted.
    """
    if not fits:
        raise ModelError(f"{model} takes images of {wanted}, got {'x'.join(map(str, in_shape))}")
