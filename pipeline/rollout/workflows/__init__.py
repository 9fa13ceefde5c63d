"""Workflows, one file each, behind `rollout/workflow.py`."""
