"""What stands between an engine and programs that speak a model server's protocol.

`endpoint.py` serves an OpenAI-compatible interface on the loopback address, for agents that run beside a rollout rank:
`openai_requests.py` reads a body into what the engine takes, `openai_answers.py` writes what it gives back, `accept.py`
bounds connections. The folder stands in front of an engine: of the stages it may import `rollout/engine.py` alone.
"""
