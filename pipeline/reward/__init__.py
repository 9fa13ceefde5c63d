"""Reward: completions come in, finite numbers go out. Functions run in a pool of killable child processes."""
