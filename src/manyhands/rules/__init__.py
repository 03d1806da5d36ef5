"""How is an update applied? Functions from gradient to step, living where the weights live."""

from manyhands.rules.adagrad import Adagrad
from manyhands.rules.adam import Adam
from manyhands.rules.block import Block
from manyhands.rules.by_name import by_name
from manyhands.rules.chain import chain
from manyhands.rules.clip import ClipNorm, ClipValue
from manyhands.rules.decay import WeightDecay
from manyhands.rules.delay import AdaptiveDamping, AgeAware, DelayCompensation, StalenessAware
from manyhands.rules.momentum import Momentum
from manyhands.rules.nesterov import Nesterov
from manyhands.rules.rmsprop import RmsProp
from manyhands.rules.schedules import Cosine, StepDecay, WarmUp
from manyhands.rules.sgd import Sgd
from manyhands.rules.torch import Torch
from manyhands.rules.total_momentum import TotalMomentum

__all__ = [
    "Adagrad",
    "Adam",
    "AdaptiveDamping",
    "AgeAware",
    "Block",
    "ClipNorm",
    "ClipValue",
    "Cosine",
    "DelayCompensation",
    "Momentum",
    "Nesterov",
    "RmsProp",
    "Sgd",
    "StalenessAware",
    "StepDecay",
    "Torch",
    "TotalMomentum",
    "WarmUp",
    "WeightDecay",
    "by_name",
    "chain",
]
