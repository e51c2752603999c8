"""Checkpoints: written asynchronously and atomically, verified by checksums, restored onto any mesh."""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from orbax.checkpoint import checkpoint_managers as policies

from lineage.configs import schema
from lineage.configs.run import Checkpoint
from lineage.runs.folder import last_step
from lineage.train import distributed
from lineage.train.adapters import ADAPTERS
from lineage.train.step import TrainState


class Checkpoints(contextlib.AbstractContextManager):
    """Checkpoints of a run in `workdir/checkpoints/<step>`: the newest ones and, by a metric, the best.

    Each holds the state, a checksum of every array, the number of the next batch and the config. It appears complete or
    not at all.

    Attributes:
        say: callback for messages about errors that do not stop the run.

    Raises:
        ValueError: `options.on_error` is "continue" in a run of several processes.
    """

    def __init__(self, workdir: Path, options: Checkpoint | None = None):
        self.folder, self.say = workdir.absolute() / "checkpoints", partial(print, file=sys.stderr)
        self.options = options = options or Checkpoint()
        if options.on_error == "continue" and jax.process_count() > 1:
            raise ValueError("checkpoint.on_error is 'continue': it must be 'stop' in runs of several processes.")
        sign = 1 if options.best_is_highest else -1

        def rank(metrics):
            return sign * metrics.get(options.best, -sign * float("inf"))  # without the metric: the worst

        preserve = [policies.LatestN(options.keep)]
        if options.best:
            preserve.append(policies.BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False))
        settings = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(preserve), best_fn=rank if options.best else None
        )
        # Learned parameters do not compress. Each item and each array costs time; arrays cost less in Zarr 3.
        state = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True)
        handlers = {"state": state, "about": ocp.JsonCheckpointHandler()}
        self._open = partial(ocp.CheckpointManager, self.folder, options=settings, item_handlers=handlers)
        self._manager = self._open()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint; None without one."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint by the metric; None without one."""
        return self._manager.best_step() if self.options.best else None

    def save(self, state: TrainState, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Save a state asynchronously; return when its buffers may be reused. An existing step is not written again.

        Raises:
            ValueError: `metrics` is not empty and lacks the metric that the best checkpoint is chosen by.
            OSError: this checkpoint, or the one before, cannot be written, and `on_error` is "stop".
        """
        step, best = int(state.step), self.options.best
        if best and metrics and best not in metrics:
            raise ValueError(f"checkpoint.best is {best!r}: it must be one of {', '.join(metrics)}.")
        if step in self._manager.all_steps():
            return
        about = {"next_batch": step, "checksums": _checksums(state), "config": dict(config)}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about))
        for _ in range(2):  # the first attempt may raise the error of the save before
            try:
                with self._os_errors():
                    self._manager.save(step, args=args, metrics=dict(metrics) if best and metrics else None)
                return
            except OSError as error:
                if self.options.on_error == "stop":
                    raise
                self.say(f"{error} The run continues.")
            with contextlib.suppress(Exception):  # the failure has been reported
                self._manager.close()
            clean(self.folder.parent)
            self._manager = self._open()

    def restore(self, target: TrainState, step: int | None = None) -> TrainState:
        """Return the state of a step, on the shardings of `target` (arrays, or shapes with shardings).

        Args:
            step: None: the newest intact one; damaged ones after it are renamed to `<step>.damaged`.

        Raises:
            ValueError: the checkpoint is, or all are, damaged or of another model.
        """
        steps = sorted(self._manager.all_steps(), reverse=True) if step is None else [step]
        if not steps or step not in (None, *self._manager.all_steps()):
            which = "" if step is None else f" of step {step}"
            raise FileNotFoundError(f"there is no checkpoint{which} in {self.folder}.")
        damaged = {}
        for each in steps:
            try:
                state = read_checkpoint(self.folder / str(each), target)
            except ValueError as error:
                damaged[each] = error
            else:
                for other, error in damaged.items():
                    self._set_aside(other)
                    self.say(f"{error}. It was renamed to {other}.damaged; the run resumes from step {each}.")
                return state
        newest, *others = damaged
        rest = f"; no better: {', '.join(map(str, others))}" if others else ""
        raise ValueError(f"{damaged[newest]}{rest}") from damaged[newest].__cause__

    def _set_aside(self, step):
        if jax.process_index() == 0:
            aside = self.folder / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)
        sync_global_devices("set aside")
        self._manager.reload()

    def wait(self) -> None:
        """Wait until everything is written; raises as `save` does."""
        with self._os_errors():
            self._manager.wait_until_finished()

    def __exit__(self, *_) -> None:
        with self._os_errors():
            self._manager.close()

    @contextlib.contextmanager
    def _os_errors(self):
        try:
            yield
        except jax.errors.JaxRuntimeError:  # raised by the computation whose result was to be saved
            raise
        except Exception as error:  # Orbax raises exceptions of many types, also from its threads
            message = f"a checkpoint could not be written to {self.folder} ({os_reason(error)})"
            raise OSError(f"{message}. Existing checkpoints are kept.") from error


def os_reason(error: Exception) -> str:
    """Return why the operating system refused a write, such as "No space left on device", or else the error's text.

    TensorStore, which writes the arrays, raises ValueError and gives the error number only in the text.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else " ".join(str(error).split())[:300]


def clean(workdir: Path) -> None:
    """Delete what interrupted saves have left."""
    if jax.process_index() == 0:
        for folder in (workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*workdir.glob(".*.partial"), *workdir.glob("artifacts/.*.partial")):
            file.unlink(missing_ok=True)


def read_variables(workdir: Path) -> dict[str, Any]:
    """Return the variables of a run's model, on the host, from its newest checkpoint; see `read_newest`."""
    state = read_newest(workdir)
    return {"params": state.adapter.apply(state.frozen, state.params), **state.collections}


def read_newest(workdir: Path) -> TrainState:
    """Return the newest state of a run as far as its model needs it, see `read_checkpoint`."""
    if not (step := last_step(workdir)):
        raise FileNotFoundError(f"there is no checkpoint in {workdir / 'checkpoints'}.")
    return read_checkpoint(workdir.absolute() / "checkpoints" / str(step))


def read_checkpoint(folder: Path, target: TrainState | None = None) -> TrainState:
    """Read the state in the folder of a step and verify its checksums.

    Args:
        target: arrays, or shapes with shardings, of the whole state; if one process cannot read its part, all raise.
            None: read what the model needs, as numpy arrays on the host: the parameters, or their average as `params`
            if one is kept, the collections and what the adapter keeps frozen. The optimizer's state and `ema` are None.

    Raises:
        ValueError: the checkpoint is damaged, or not of the target's shapes; the message says why.
    """
    state, cause, reason = None, None, "its checksums do not match"
    try:
        about = json.loads((folder / "about" / "metadata").read_text(encoding="utf-8"))
        state, sums, expected = (_read_model if target is None else _read_state)(folder / "state", about, target)
    except (jax.errors.JaxRuntimeError, MemoryError):  # too little memory
        raise
    except Exception as error:  # Orbax raises exceptions of many types, bare ones too
        reason, cause = " ".join(str(error).split())[:200], error
    if target is not None and (failed := distributed.failures(cause is not None)):
        reason = reason if cause else f"process {failed[0]} cannot read its part"
    elif cause is None and sums() == expected:
        return state
    alternative = "" if target is None else " or of another model than the config's"
    raise ValueError(f"the checkpoint {folder} is damaged{alternative}: {reason}") from cause


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Yield a reader that does not wait for other processes: one that fails must not block them."""
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        yield checkpointer


def _read_state(folder, about, target):
    """Return the state, a function that computes its checksums on all devices, and the expected checksums."""
    places = ocp.checkpoint_utils.construct_restore_args(target)
    with _checkpointer() as checkpointer:
        state = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(target, restore_args=places))
    return state, partial(_checksums, state), about["checksums"]


def _read_model(folder, about, _):
    """Return the same as `_read_state`, of the part of the state that the model needs, on the host."""
    with _checkpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        source = "params" if saved["ema"] is None else "ema"
        wanted = {key: saved[key] for key in (source, "collections", "frozen") if saved.get(key)}
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=kinds, partial_restore=True)
        found = checkpointer.restore(folder, args=args)
    sums = jax.tree.unflatten(jax.tree.structure(TrainState(**saved)), about["checksums"])
    adapter = schema.build(ADAPTERS, schema.tuples(about["config"]["adapter"]))
    rest = {"frozen": found.get("frozen"), "adapter": adapter}
    state = TrainState(about["next_batch"], found[source], None, found.get("collections", {}), None, **rest)
    return state, lambda: jax.tree.map(_host_checksum, found), {key: getattr(sums, key) for key in wanted}


def _checksums(state: TrainState) -> list[int]:
    """Return the sum of the bits of each leaf, which does not depend on its sharding.

    Orbax's own files have no checksums that are verified.
    """
    return [int(total) for total in jax.device_get(_sums_of_bits(jax.tree.leaves(state)))]


@jax.jit
def _sums_of_bits(leaves):
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    # Integer sums do not depend on the order.
    bits = [a if a.dtype == bool else jax.lax.bitcast_convert_type(a, words[a.dtype.itemsize]) for a in leaves]
    return [jnp.sum(a.astype(jnp.uint32)) for a in bits]


def _host_checksum(array: np.ndarray) -> int:
    """Return the same checksum, computed on the host, which may have room for what no device can hold."""
    return int(array.reshape(-1).view(f"u{array.itemsize}").sum(dtype=np.uint32))
