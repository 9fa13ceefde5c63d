"""Algorithm: pure functions on packed, token-aligned tensors; they know no engine. Presets are YAML."""
