"""Trajectory: groups come in, immutable HDF5 shards lie on disk, verified rows go out; the ledger says what became of each group. h5py is imported here only."""
