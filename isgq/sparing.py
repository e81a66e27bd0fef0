"""Which weight gradients autograd may leave out: those that a session will replace, before anybody can see them.

That is so where the backward pass ends with the synchronisation of just this pass, and the weight travels as factors.
The first step, which compares the pairs with autograd's gradients, has them all. Later nothing is compared with them;
but what does not come from the pairs still arrives at the weight, and is noticed (:mod:`isgq.layers.spared`).
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from isgq.core.payload import Factors
from isgq.layers.capture import Unit
from isgq.layers.spared import spare
from isgq.windows import Window


class Sparing:
    """Decides call by call.

    Args:
        windows: of all trainable parameters.
        caught: takes the pairs.
        at_once: whether a backward pass that ends now is synchronised.

    Attributes:
        factored: names of the weights that travel as factors, by the plan that holds.
    """

    def __init__(
        self, windows: Mapping[str, Window], caught: Callable[[Unit, Factors], None], at_once: Callable[[], bool]
    ) -> None:
        self._windows, self._caught, self._at_once = windows, caught, at_once
        self.factored: frozenset[str] = frozenset()

    def __call__(self, unit: Unit, x: Tensor, output: Tensor) -> Tensor | None:
        """The output of a call with another history, or None."""
        return spare(unit, x, output, self._catch) if unit.name in self.factored else None

    def _catch(self, unit: Unit, factors: Factors, adds: bool) -> bool:
        self._caught(unit, factors)
        window = self._windows[unit.name]
        if not (adds and unit.name in self.factored and self._at_once() and window.fresh):
            return False
        window.owe(lambda: unit.contract(factors.x, factors.d))
        return True
