"""Log-probs and entropies of sampled tokens, from hidden states and the language-model head, or from logits; never all
logits at once. `logprob.py` is what callers import."""
