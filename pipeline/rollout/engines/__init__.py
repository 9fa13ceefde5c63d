"""Inference engines behind `rollout/engine.py`.

`hf_engine.py` is the default engine: it owns the decoding thread. What it is made of, from the outside in:
`batch_decoder.py` (who sits in which row, what is computed next), `served_model.py` (the model and its passes),
`slot_attention.py` and `slot_cache.py` (attention over the rows' keys and values), `token_sampler.py` (logits to
tokens), `sequence_state.py` and `stop_check.py` (one completion under way). Requests come in on any thread and wait in
the engine's inbox for a free row; whoever pauses the engine waits for the token being computed; a completion's future
is resolved on its own asyncio loop.
"""
