"""Why a rank cannot take part in a step, as far as no carrier can tell."""

from collections.abc import Collection, Mapping

from torch import nn

from isgq.aggregate import Outgoing
from isgq.core.errors import InstrumentError, NonFiniteError
from isgq.core.extremes import check_finite
from isgq.instrumented import check_frozen
from isgq.windows import Window
from isgq.wire.header import Status


def refusal(windows: Mapping[str, Window], dense: Collection[str], frozen: Collection[nn.Parameter]) -> Outgoing | None:
    """What to tell the other ranks; None if nothing is wrong.

    Args:
        windows: of all trainable parameters, in the order of the headers.
        dense: names of the gradients that travel without a carrier.
        frozen: parameters that were frozen when the session began.
    """
    touched = [window for window in windows.values() if window.touched]
    if touched and not any(window.filled for window in touched):
        return Outgoing(status=Status.EMPTY_BATCH)
    name = ""
    try:
        check_frozen(frozen)
        for name in dense:
            if windows[name].touched:
                check_finite(windows[name].contribution(), f"the gradient of {name!r}")
    except NonFiniteError as error:
        return Outgoing(status=Status.NON_FINITE, parameter=list(windows).index(name), error=error)
    except InstrumentError as error:
        return Outgoing(status=Status.FAILED, error=error)
    return None
