"""Inference engines, one file each, behind `rollout/engine.py`."""
