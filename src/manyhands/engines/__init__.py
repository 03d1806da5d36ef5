"""Engines carry out a run: processes of this machine (`Local`), or a virtual cluster in virtual time (`Virtual`)."""
