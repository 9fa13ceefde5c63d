"""Losses of the supervised tasks: packed log-probs or scores come in, shares of a global loss and sums go out."""
