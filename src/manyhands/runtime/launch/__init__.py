"""How ranks are started, find each other and report how they ended."""
