"""The vLLM engine: requests in, tokens with log-probs and versions out; it waits for requests, and while paused."""
