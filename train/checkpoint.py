"""Checkpoints: asynchronous, atomic, restored to wherever the target lies."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from orbax.checkpoint import checkpoint_managers as policies

from lineage.train.adapters import merged
from lineage.train.state import TrainState


class Checkpoints(contextlib.AbstractContextManager):
    """The checkpoints of a run in `workdir/checkpoints/<step>`: the newest and, by a metric, the best.

    Each holds the state, a checksum of every array, the number of the next batch and the config, and appears whole or
    not at all.

    Args:
        workdir: of the run.
        keep: how many of the newest stay.
        best: the metric, such as "validation/loss", whose best checkpoint stays too; "" keeps none for that.
        best_is_highest: whether more of the metric is better.
        on_error: what a save that fails, as on a full disk, does to the run: "stop" | "continue".

    Attributes:
        say: is called with a sentence when something went wrong that the run survives.

    Raises:
        ValueError: `keep` is below 1, or `on_error` is neither, or "continue" in a run of several processes.
    """

    def __init__(
        self, workdir: Path, *, keep: int = 2, best: str = "", best_is_highest: bool = False, on_error: str = "stop"
    ):
        self.folder, self.say = Path(workdir).absolute() / "checkpoints", partial(print, file=sys.stderr)
        self._best, self._on_error = best, on_error
        if on_error not in ("stop", "continue"):
            raise ValueError(f"checkpoint.on_error is {on_error!r}: it must be stop or continue.")
        if on_error == "continue" and jax.process_count() > 1:
            raise ValueError("checkpoint.on_error is 'continue': of several processes the others would wait for one.")
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}: at least the newest, 1, must stay.")
        preserve = [policies.LatestN(keep)]
        # A metric that is not there counts as the worst.
        sign = 1 if best_is_highest else -1
        rank = lambda metrics: sign * metrics.get(best, -sign * float("inf"))  # noqa: E731
        if best:
            preserve.append(policies.BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(preserve), best_fn=rank if best else None
        )
        # Learned numbers do not compress. Each item costs time, as does each array, less in Zarr's third format.
        state = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True)
        handlers = {"state": state, "about": ocp.JsonCheckpointHandler()}
        self._open = partial(ocp.CheckpointManager, self.folder, options=options, item_handlers=handlers)
        self._manager = self._open()

    @property
    def latest(self) -> int | None:
        """The newest checkpoint's step; None without one."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The best checkpoint's step by the metric; None without one."""
        return self._manager.best_step() if self._best else None

    def save(self, state: TrainState, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts writing; returns when the state may be changed. A step that is there already is left alone.

        Raises:
            ValueError: there are metrics, but the one that the best is chosen by is not among them.
            OSError: this one, or the one before, cannot be written, such as to a full disk, and the run is to stop.
        """
        step = int(state.step)
        if self._best and metrics and self._best not in metrics:
            raise ValueError(f"checkpoint.best is {self._best!r}: it must be one of {', '.join(metrics)}.")
        if step in self._manager.all_steps():
            return
        about = {"next_batch": step, "checksums": _checksums(state), "config": dict(config)}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about))
        for _ in range(2):  # the first attempt may say that the save before has failed
            try:
                with self._explained():
                    self._manager.save(step, args=args, metrics=dict(metrics) if self._best and metrics else None)
                return
            except OSError as error:
                if self._on_error == "stop":
                    raise
                self.say(f"{error} The run goes on.")
            with contextlib.suppress(Exception):  # that it has failed is said
                self._manager.close()
            clean(self.folder.parent)
            self._manager = self._open()

    def restore(self, target: TrainState, step: int | None = None) -> TrainState:
        """The state of a step, on the shardings of `target` (arrays, or shapes with shardings).

        None is the newest step whose checkpoint is whole: those after it are set aside, as `<step>.damaged`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is, or all are, damaged or of another model.
        """
        steps = sorted(self._manager.all_steps(), reverse=True) if step is None else [step]
        if not steps or step not in (None, *self._manager.all_steps()):
            raise FileNotFoundError(
                f"there is no checkpoint{'' if step is None else f' of step {step}'} in {self.folder}."
            )
        damaged = {}
        for each in steps:
            try:
                state = self._restored(target, each)
            except ValueError as error:
                damaged[each] = error
            else:
                for other, error in damaged.items():
                    self._set_aside(other)
                    self.say(f"{error}; it is kept as {other}.damaged, and the run goes on from step {each}.")
                return state
        newest, *others = damaged
        rest = f"; no better: {', '.join(map(str, others))}" if others else ""
        raise ValueError(f"{damaged[newest]}{rest}") from damaged[newest].__cause__

    def _restored(self, target, step):
        places = ocp.checkpoint_utils.construct_restore_args(target)
        state = ocp.args.PyTreeRestore(target, restore_args=places)
        args = ocp.args.Composite(state=state, about=ocp.args.JsonRestore())
        reason, cause = "its numbers are not those that were saved", None
        try:
            restored = self._manager.restore(step, args=args)
            if _checksums(restored["state"]) == restored["about"]["checksums"]:
                return restored["state"]
        except jax.errors.JaxRuntimeError:  # memory, not the checkpoint
            raise
        except Exception as error:  # Orbax raises bare ones too
            reason, cause = " ".join(str(error).split())[:200], error
            if "name mismatch" in reason:
                reason = "another process of this run says so"
            else:  # the other processes wait at the end of Orbax's restore: another name there ends it for them too
                with contextlib.suppress(AssertionError):
                    sync_global_devices("damaged")
        raise ValueError(
            f"the checkpoint {self.folder / str(step)} is damaged or of another model than the config's: {reason}"
        ) from cause

    def _set_aside(self, step):
        if jax.process_index() == 0:
            aside = self.folder / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)
        sync_global_devices("set aside")
        self._manager.reload()

    def wait(self) -> None:
        """Returns when everything is on the disk; raises as `save` does."""
        with self._explained():
            self._manager.wait_until_finished()

    def __exit__(self, *_) -> None:
        with self._explained():
            self._manager.close()

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except jax.errors.JaxRuntimeError:  # of the computation whose result was to be saved
            raise
        except Exception as error:  # whatever Orbax met in the background
            code, text = re.search(r"os_error_code='(\d+)'", str(error)), " ".join(str(error).split())[:300]
            raise OSError(
                f"a checkpoint could not be written to {self.folder} ({os.strerror(int(code[1])) if code else text}): "
                "those that are complete stay."
            ) from error


def clean(workdir: Path) -> None:
    """Deletes what saves that were cut short have left."""
    if jax.process_index() == 0:
        for folder in (workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*workdir.glob(".*.partial"), *workdir.glob("artifacts/.*.partial")):
            file.unlink(missing_ok=True)


def read_variables(workdir: Path) -> dict[str, Any]:
    """A model's variables from the newest checkpoint of a run; its parameters' average, where one is kept.

    Raises:
        FileNotFoundError: there is none.
    """
    return merged(read_saved(workdir))


def read_saved(workdir: Path) -> dict[str, Any]:
    """The same; of an adaptation, what is trained and its base, see `models.adapt`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    steps = [int(step.name) for step in (workdir / "checkpoints").glob("*") if step.name.isdigit()]
    if not steps:
        raise FileNotFoundError(f"there is no checkpoint in {workdir / 'checkpoints'}.")
    folder = workdir.absolute() / "checkpoints" / str(max(steps))
    try:
        return _read(folder)
    except MemoryError:
        raise
    except Exception as error:  # Orbax raises bare ones too
        raise ValueError(f"the checkpoint {folder} is damaged: {' '.join(str(error).split())[:200]}") from error


def _read(folder):
    with ocp.PyTreeCheckpointer() as checkpointer, ocp.Checkpointer(ocp.JsonCheckpointHandler()) as descriptions:
        saved = checkpointer.metadata(folder / "state").item_metadata.tree
        name = "params" if saved["ema"] is None else "ema"
        item = {key: saved[key] for key in (name, "collections") if saved.get(key)}
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=kinds, partial_restore=True)
        found = checkpointer.restore(folder / "state", args=args)
        sums = descriptions.restore(folder / "about")["checksums"]
    sums = jax.tree.unflatten(jax.tree.structure(TrainState(**saved)), sums)
    if any(jax.tree.map(_sum_of_bits, found[key]) != getattr(sums, key) for key in item):
        raise ValueError("its numbers are not those that were saved")
    return {**found.get("collections", {}), "params": found[name]}


def _checksums(state: TrainState) -> list[int]:
    """A sum of each leaf's bits, the same wherever its parts lie: what is on the disk has none that is checked."""
    return [int(total) for total in jax.device_get(_sums_of_bits(jax.tree.leaves(state)))]


@jax.jit
def _sums_of_bits(leaves):
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    # Whole numbers add up to the same in any order.
    bits = [a if a.dtype == bool else jax.lax.bitcast_convert_type(a, words[a.dtype.itemsize]) for a in leaves]
    return [jnp.sum(a.astype(jnp.uint32)) for a in bits]


def _sum_of_bits(array: np.ndarray) -> int:
    """The same on the host, where there may be room for what no device has."""
    return int(array.reshape(-1).view(f"u{array.itemsize}").sum(dtype=np.uint32))
