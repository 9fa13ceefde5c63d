"""Observe: metrics, progress, heartbeats, status and the report of a run."""
