"""Which sequences go together, and their tokens end to end. In: lengths, or ragged and padded arrays. Out: bins, plans,
packed arrays, position ids, shares for context parallelism, prefix tries. What callers import: `packing.py` (plans),
`ragged.py` (pack, unpack, position ids), `zigzag.py`, `prefix_trie.py`.
"""
