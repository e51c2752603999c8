"""Checkpoints: asynchronous, atomic, restored to wherever the target lies."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from train.state import TrainState


class Checkpoints(contextlib.AbstractContextManager):
    """The checkpoints of a run in `workdir/checkpoints/<step>`: the newest and, by a metric, the best.

    Each holds the state, the number of the next batch and the config, and appears whole or not at all.

    Args:
        workdir: of the run.
        keep: how many of the newest stay.
        best: the metric, such as "validation/loss", whose best checkpoint stays too; "" keeps none for that.
        best_is_highest: whether more of the metric is better.
    """

    def __init__(self, workdir: Path, *, keep: int = 1, best: str = "", best_is_highest: bool = False):
        self.folder = Path(workdir).absolute() / "checkpoints"
        self._best = best
        preserve = [policies.LatestN(keep)]
        # A metric that is not there counts as the worst.
        sign = 1 if best_is_highest else -1
        rank = lambda metrics: sign * metrics.get(best, -sign * float("inf"))  # noqa: E731
        if best:
            preserve.append(policies.BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(preserve), best_fn=rank if best else None
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """The newest checkpoint's step; None without one."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The best checkpoint's step by the metric; None without one."""
        return self._manager.best_step() if self._best else None

    def save(self, state: TrainState, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts writing; returns when the state may be changed. A step that is there already is left alone."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            position=ocp.args.JsonSave({"next_batch": step}),
            config=ocp.args.JsonSave(dict(config)),
        )
        self._manager.save(step, args=args, metrics=dict(metrics) if self._best and metrics else None)

    def restore(self, target: TrainState, step: int | None = None) -> TrainState:
        """The state of a step (None: the newest), on the shardings of `target` (arrays, or shapes with shardings).

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged, or of another model.
        """
        step = self.latest if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise FileNotFoundError(
                f"there is no checkpoint{'' if step is None else f' of step {step}'} in {self.folder}."
            )
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            return self._manager.restore(step, args=args)["state"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the checkpoint {self.folder / str(step)} is damaged or of another model than the config's: {reason}"
            ) from error

    def wait(self) -> None:
        """Returns when everything is on the disk."""
        self._manager.wait_until_finished()

    def __exit__(self, *_) -> None:
        self._manager.close()
