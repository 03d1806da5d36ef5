"""What do workers send? The vector itself, or something smaller that is decoded where it arrives."""

from manyhands.codecs.bylayer import ByLayer
from manyhands.codecs.dgc import Dgc
from manyhands.codecs.elias import Elias
from manyhands.codecs.feedback import Feedback
from manyhands.codecs.fixed import Fixed
from manyhands.codecs.half import Half
from manyhands.codecs.onebit import OneBit
from manyhands.codecs.qsgd import Qsgd
from manyhands.codecs.raw import Raw
from manyhands.codecs.rice import Rice
from manyhands.codecs.sampled import SampledTopK
from manyhands.codecs.strom import Strom
from manyhands.codecs.terngrad import TernGrad
from manyhands.codecs.topk import TopK
from manyhands.codecs.warmup import WarmUp

__all__ = [
    "ByLayer",
    "Dgc",
    "Elias",
    "Feedback",
    "Fixed",
    "Half",
    "OneBit",
    "Qsgd",
    "Raw",
    "Rice",
    "SampledTopK",
    "Strom",
    "TernGrad",
    "TopK",
    "WarmUp",
]
