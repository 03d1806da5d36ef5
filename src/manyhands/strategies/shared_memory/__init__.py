"""Lock-free training in shared memory: one vector of weights for all workers of a host."""

from manyhands.strategies.shared_memory.shared_memory import SharedMemory

__all__ = ["SharedMemory"]
