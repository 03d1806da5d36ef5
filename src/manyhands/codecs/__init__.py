"""What do workers send? The vector itself, or something smaller that is decoded where it arrives."""

from manyhands.codecs.feedback import Feedback
from manyhands.codecs.half import Half
from manyhands.codecs.raw import Raw
from manyhands.codecs.topk import TopK

__all__ = ["Feedback", "Half", "Raw", "TopK"]
