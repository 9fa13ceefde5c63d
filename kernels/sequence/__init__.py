"""Scans and sums inside packed sequences: GAE, discounted sums, segment sums and means. `sequence.py` is what callers
import."""
