"""What a person calls: train, join, compare, tune; the specification of a run and its result."""
