"""Rollout: assignments come in, groups of trajectories go out.

The rank loop (`rank_loop.py`) takes messages; the executor runs workflows on its own asyncio thread; each engine
decodes on its own thread. The executor waits for the engine (a token at a time) and for rewards; the engine waits for
requests and while weights load; the loop waits for messages only.
"""
