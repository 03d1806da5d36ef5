"""What is split? Data and layers; and the schedules by which pipeline stages process micro-batches."""

from manyhands.splits import schedules

__all__ = ["schedules"]
