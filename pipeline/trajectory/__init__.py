"""Trajectory: groups come in, immutable HDF5 shards lie on disk, verified rows go out; the ledger says how groups end.

In: finished groups from the rollout loop (`writer.py`, which waits for the disk only in `flush`). Out: rows to every
trainer rank (`store.py`, which waits at most `retry_seconds` for names that are late) and notices to the head. h5py is
imported here only.
"""
