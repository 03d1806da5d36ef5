"""Real processes: the links between them, their membership of a run, and how they are launched."""
