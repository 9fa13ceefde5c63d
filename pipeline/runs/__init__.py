"""Runs: each file wires the stages for one kind of run; its docstring draws the flow."""
