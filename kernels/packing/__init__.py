"""Which sequences go together, and their tokens end to end. In: lengths, or ragged and padded arrays. Out: bins, plans,
packed arrays, position ids, shares for context parallelism, prefix tries. `packing.py` is what callers import.
"""
