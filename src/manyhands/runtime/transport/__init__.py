"""The port among real processes: links, wire format, flow control, shared memory."""
