"""Communication-efficient distributed training: quantize the factors of the gradient, not the gradient."""

from isgq import codecs, ddp, wire
from isgq.codecs.roles import choose_codecs
from isgq.core.errors import IsgqError
from isgq.core.keys import Key
from isgq.core.payload import Factors
from isgq.core.registry import codec, register_codec
from isgq.doctor import doctor
from isgq.federated import Federated
from isgq.forecast import Forecast, plan
from isgq.instrumenting import instrument
from isgq.masters import MasterWeights
from isgq.session import Session
from isgq.telemetry import Telemetry
from isgq.version import __version__

__all__ = [
    "Factors",
    "Federated",
    "Forecast",
    "IsgqError",
    "Key",
    "MasterWeights",
    "Session",
    "Telemetry",
    "__version__",
    "choose_codecs",
    "codec",
    "codecs",
    "ddp",
    "doctor",
    "instrument",
    "plan",
    "register_codec",
    "wire",
]
