"""Real processes, real signals, real sockets."""
