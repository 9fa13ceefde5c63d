"""An inference engine in a process of its own, which dies with its rank.

```
 rank ── starts before MPI ──► nursery ── on demand ──► host: builds and serves one engine
  └─ ChildEngine ◄──── one frame a request, one an answer; gauges ────┘
        └── weights ──► two buckets of memory that both have mapped ──► views
```
`nursery.py` is the rank's side of `nursery_process.py`; `child_engine.py` is the rank's side of `host.py`;
`call_table.py` holds the calls under way and `silence_watch.py` judges stalls; `bucket_writer.py` (rank) and
`bucket_reader.py` (host) are the two ends of the buckets in `buckets.py`; `protocol.py` lists the frames.
"""
