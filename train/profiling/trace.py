"""Traces of training steps, for TensorBoard and xprof."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


class Trace(contextlib.AbstractContextManager):
    """Recorder of a trace of some steps into `workdir/profile`, for TensorBoard's profile plugin and xprof.

    Args:
        steps: first and last step, counted from 1; None records nothing.
        start: number of steps completed before.
        total: number of steps of the run.
        notify: callback for messages.

    Raises:
        ValueError: the run does not include the steps.
    """

    def __init__(
        self, workdir: Path, steps: tuple[int, int] | None, start: int, total: int, notify: Callable[[str], None]
    ):
        if steps and not start < steps[0] <= steps[1] <= total:
            given = "the profile covers steps {:,} to {:,}".format(*steps)
            raise ValueError(f"{given}: they must be in order, and part of this run, {start + 1:,} to {total:,}.")
        self.folder, self.steps, self.notify = workdir / "profile", steps, notify
        self.is_recording = False

    def step(self, step: int) -> contextlib.AbstractContextManager:
        """Return a context that marks the dispatch of a step in the trace; start the trace at its first step."""
        if self.steps and step == self.steps[0]:
            jax.profiler.start_trace(str(self.folder))
            self.is_recording = True
        if self.is_recording:
            return jax.profiler.StepTraceAnnotation("train", step_num=step)
        return contextlib.nullcontext()

    def after(self, step: int, results: Any) -> None:
        """Wait for the results of the last step of the trace, and end the trace."""
        if self.is_recording and step == self.steps[1]:
            jax.block_until_ready(results)
            self._stop()
            steps = "{:,} to {:,}".format(*self.steps)
            self.notify(f"profile of steps {steps}: {self.folder} (`tensorboard --logdir {self.folder}`)")

    def _stop(self):
        self.is_recording = False
        jax.profiler.stop_trace()

    def __exit__(self, *_) -> None:
        if self.is_recording:
            self._stop()


def parse(text: str) -> tuple[int, int]:
    """Return the first and the last step of a text such as "20:25", or "20" for one step."""
    first, colon, last = text.partition(":")
    try:
        return int(first), int(last if colon else first)
    except ValueError:
        raise ValueError(f"the profile is {text!r}: it must be the first and the last step, such as 20:25.") from None
