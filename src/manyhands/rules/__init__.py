"""How is an update applied? Functions from gradient to step, living where the weights live."""

from manyhands.rules.adagrad import Adagrad
from manyhands.rules.adam import Adam
from manyhands.rules.block import Block
from manyhands.rules.chain import chain
from manyhands.rules.momentum import Momentum
from manyhands.rules.nesterov import Nesterov
from manyhands.rules.rmsprop import RmsProp
from manyhands.rules.sgd import Sgd
from manyhands.rules.torch import Torch

__all__ = ["Adagrad", "Adam", "Block", "Momentum", "Nesterov", "RmsProp", "Sgd", "Torch", "chain"]
