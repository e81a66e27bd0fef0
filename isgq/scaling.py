"""Loss scaling (torch.amp.GradScaler) with compressed gradients.

Gradients of a scaled loss are unscaled before anything is encoded, so memories are in units of the gradient whatever
the scale is, and scaled again where they go back to ``p.grad``, where the scaler expects them. An overflow on one rank
refuses the step on all; then every rank finds Inf in ``p.grad``, so every rank's scaler skips its optimizer's step and
halves its scale.
"""

from collections.abc import Collection

import torch

from isgq.windows import Window

_LEAST = 2.0**-24  # the smallest number of float16: what overflows at this scale is no matter of the scale


class LossScale:
    """What a session knows of a scaler.

    Args:
        scaler: the user's; None, or a disabled one, for a loss that is not scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled at all."""
        return self._scaler is not None

    @property
    def value(self) -> float:
        """By how much the loss is multiplied now."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def absorbs_overflow(self, windows: Collection[Window]) -> bool:
        """Leave the refused step to the scaler: Inf in every gradient. False where that would not help."""
        if self._scaler is None or self.value < _LEAST:
            return False
        for window in windows:
            if window.touched or window.parameter.grad is not None:
                window.close(torch.full_like(window.parameter, float("inf")))
        return True
