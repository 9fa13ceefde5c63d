"""Train: committed plans come in, new weights and statistics go out.

Every trainer rank runs the same learner loop (`learner.py`). It waits for the head's messages outside of collectives;
between Commit and StepDone all trainer ranks are in the step together.
"""
