"""The real world: processes, links between them, and whoever watches over them."""
