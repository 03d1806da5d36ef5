"""What is split? Data, layers; and the schedules that bring the pieces together."""

from manyhands.splits import schedules

__all__ = ["schedules"]
