"""A rank that lends its device to a vLLM engine: its thread applies what the leader's applies, and steps with it.

It knows neither requests nor answers. Weights come to it from this rank's own receiver. Whatever goes wrong here, or on
another rank of the instance, ends the whole instance: `on_failure`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch
from transformers import AutoTokenizer

from pekoe.pipeline.rollout.engine import EngineSettings, Instance
from pekoe.pipeline.rollout.engines.vllm.checkpoint_names import CheckpointNames
from pekoe.pipeline.rollout.engines.vllm.commands import Load, Stop, Turn
from pekoe.pipeline.rollout.engines.vllm.lockstep import Lockstep
from pekoe.pipeline.rollout.engines.vllm.turn_codec import decode_turn
from pekoe.pipeline.rollout.engines.vllm.vllm_core import VllmCore

Receive = Callable[[int], Iterable[tuple[str, torch.Tensor]]]


class VllmFollower:
    """Built together with the leader's engine: returns when all ranks of the instance have theirs."""

    def __init__(
        self,
        settings: EngineSettings,
        instance: Instance,
        receive: Receive,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`receive(version)` gives the weights when the leader loads them; called on the engine's thread, it may
        block."""
        self._settings = settings
        self._instance = instance
        self._receive = receive
        self._on_failure = on_failure
        self._core: VllmCore | None = None
        self._over = threading.Event()
        built: Future[None] = Future()
        threading.Thread(target=self._run, args=(built,), name="vllm-follower", daemon=True).start()
        built.result()

    def wait(self, seconds: float) -> bool:
        """Until the leader has closed the engine; False when that takes longer."""
        return self._over.wait(seconds)

    def gauges(self) -> dict[str, float]:
        core = self._core
        return {} if core is None else {"steps": float(core.num_steps), "version": float(core.version)}

    def _run(self, built: Future[None]) -> None:
        """The engine's thread."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._settings.tokenizer_path)
            line = Lockstep(self._instance, self._on_failure)
            core = self._core = VllmCore(
                self._settings, self._instance, CheckpointNames(self._settings.path, tokenizer)
            )
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            while self._apply(core, line, decode_turn(line.share())):
                pass
        except BaseException as error:
            self._on_failure(error)
            return
        core.close()
        line.close()
        self._over.set()

    def _apply(self, core: VllmCore, line: Lockstep, turn: Turn) -> bool:
        """One turn, as the leader does it; False at the end of the engine."""
        for command in turn.commands:
            if isinstance(command, Stop):
                return False
            core.apply(command, self._receive(command.version) if isinstance(command, Load) else None)
        if turn.step:
            line.digest.add(core.step())
        return True
