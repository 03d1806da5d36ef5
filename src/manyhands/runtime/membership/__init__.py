"""Which ranks are present, lost or finished, and how every rank learns it."""
