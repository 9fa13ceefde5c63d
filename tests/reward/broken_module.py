"""A user's module that does not load."""

raise RuntimeError("this module needs a key")
