"""Batch: which rows go to which trainer rank and micro-batch."""
