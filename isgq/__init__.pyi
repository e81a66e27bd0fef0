"""The public names, and where they live; each is imported when it is first used."""

from . import codecs as codecs
from . import ddp as ddp
from . import wire as wire
from .codecs import codec as codec
from .codecs import register_codec as register_codec
from .codecs.roles import choose_codecs as choose_codecs
from .core.errors import IsgqError as IsgqError
from .core.keys import Key as Key
from .core.payload import Factors as Factors
from .diagnosis import doctor as doctor
from .federated import Federated as Federated
from .forecast import Forecast as Forecast
from .forecast import plan as plan
from .instrumenting import instrument as instrument
from .masters import MasterWeights as MasterWeights
from .session import Session as Session
from .telemetry import Telemetry as Telemetry
from .version import __version__ as __version__
