"""Trainer engines, one file or folder each, behind `train/engine.py`."""
