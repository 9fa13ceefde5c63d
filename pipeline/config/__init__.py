"""Config: YAML files and overrides come in, one checked `RunConfig` goes out. Imports no torch."""
