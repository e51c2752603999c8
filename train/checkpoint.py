"""Checkpoints: written asynchronously and atomically, verified by hashes, restored onto any mesh."""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices

from lineage.configs.atomic import absolute, regular, sealed, unsealed, write_atomic
from lineage.configs.run import Checkpoint
from lineage.configs.storage import RECORD
from lineage.runs.folder import DamagedError, read_record
from lineage.runs.locks import MovedError
from lineage.runs.process import say
from lineage.train import distributed
from lineage.train.reading import DESCRIPTION, check_description, error_number, hash_leaves, read_checkpoint
from lineage.train.step import TrainState

FOREVER = 10**9  # seconds


class Checkpoints(contextlib.AbstractContextManager):
    """Checkpoints of a run in `workdir/checkpoints/<step>`: the newest ones and, by a metric, the best.

    A checkpoint contains the state and a record: a hash of every array, the number of the next batch, the config, the
    metrics and the length of their history. Checkpoints are written atomically.

    Attributes:
        notify: callback for messages about errors that do not stop the run.

    Raises:
        ValueError: `options.on_error` is "continue" in a run of several processes, or the path is not UTF-8.
    """

    def __init__(self, workdir: Path, options: Checkpoint | None = None, notify: Callable[[str], None] = say):
        self.folder, self.notify = absolute(workdir) / "checkpoints", notify
        if str(self.folder) != str(self.folder).encode(errors="replace").decode():  # refused by TensorStore
            raise ValueError(f"the folder of the checkpoints is {str(self.folder)!r}: its name must be UTF-8.")
        self.options = options = options or Checkpoint()
        if options.on_error == "continue" and jax.process_count() > 1:
            raise ValueError("checkpoint.on_error is 'continue': it must be 'stop' in runs of several processes.")
        self._records: dict[int, dict[str, Any]] = {}
        self._failed = False  # whether a save failed
        # Asynchronous creation would wait for minutes for a folder that cannot be created. Orbax's timeout would count
        # jumps of the clock and suspension of the machine: `Watchdog` ends a run with a hanging save.
        waiting = ocp.AsyncOptions(
            create_directories_asynchronously=False, timeout_secs=FOREVER, barrier_sync_fn=_barrier()
        )
        settings = ocp.CheckpointManagerOptions(preservation_policy=self, async_options=waiting)
        # Learned parameters do not compress. Each item and each array has overhead; Zarr 3 has less per array.
        state = ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True)
        handlers = {"state": state, "about": ocp.JsonCheckpointHandler()}
        self._open = partial(ocp.CheckpointManager, self.folder, options=settings, item_handlers=handlers)
        # The manager reads these files, and would wait for a pipe in place of a checkpoint.
        _ = [regular(path) for name in ("*", f"*/{DESCRIPTION}") for path in self.folder.glob(name)]
        try:
            self._manager = retried(self._open)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            for path in sorted(self.folder.glob(f"*/{DESCRIPTION}")):
                check_description(path)
            raise

    def reload(self) -> None:
        """List the checkpoints again: a run in progress writes and deletes them."""
        retried(self._manager.reload)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint by the metric; None if there is none."""
        return self._best(self._manager.all_steps())

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metrics of an evaluation are better than those of all checkpoints."""
        best = -math.inf if self.best is None else self._score(self.record(self.best)["metrics"])
        return self._score(metrics) > best

    def _score(self, metrics):
        """Return the metric that selects the best checkpoint, negated if lower is better; nan if it is missing."""
        value = metrics.get(self.options.best, math.nan)
        return value if self.options.highest else -value

    def _best(self, steps):
        scores = {step: self._score(self.record(step).get("metrics", {})) for step in steps}
        ranked = sorted((score, step) for step, score in scores.items() if not math.isnan(score))
        return ranked[-1][1] if ranked else None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which checkpoints to keep, as an Orbax preservation policy: the newest ones and the best."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.options.keep :], self._best(steps)}
        return [step in kept for step in steps]

    def record(self, step: int) -> dict[str, Any]:
        """Return the record of a step; {} if it is damaged."""
        if step not in self._records:
            try:
                self._records[step] = read_record(self.folder / str(step))
            except (DamagedError, FileNotFoundError) as error:
                if (self.folder / str(step)).exists():  # otherwise, a run in progress has deleted it
                    self.notify(f"{error}")
                self._records[step] = {}
        return self._records[step]

    def save(self, state: TrainState, config: Mapping[str, Any], metrics: Mapping[str, float], **history: Any) -> None:
        """Save a state asynchronously; return when its buffers may be reused. Existing steps are skipped.

        Args:
            history: additional entries of the record: the number of `lines` in the history of metrics, and the
                `averages` since the last line.

        Raises:
            OSError: this checkpoint, or the previous one, cannot be written, and `on_error` is "stop".
        """
        step = int(state.step)
        if step in (existing := self._manager.all_steps()):
            return
        self._records = {saved: record for saved, record in self._records.items() if saved in existing}
        about = {"next_batch": step, "config": dict(config), "metrics": dict(metrics), **history}
        self._records[step] = about = sealed(about | {"hashes": hash_leaves(state)})
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), about=ocp.args.JsonSave(about))
        for _ in range(2):  # the first attempt may raise the error of the previous save
            try:
                with self._os_errors():
                    self._manager.save(step, args=args)
                return
            except OSError as error:
                if self.options.on_error == "stop":
                    raise
                self._failed = True
                self.notify(f"{error} The run continues.")
            with contextlib.suppress(Exception):  # the failure has been reported
                self._manager.close()
            clean(self.folder.parent)
            self._manager = self._open()

    def amend(self, step: int, **entries: Any) -> None:
        """Replace entries of the record of a saved step."""
        self._records[step] = sealed(unsealed(self.record(step)) | entries)
        if jax.process_index() == 0:
            write_atomic(self.folder / str(step) / RECORD, json.dumps(self._records[step]))

    def restore(self, target: TrainState, step: int | None = None) -> TrainState:
        """Return the state of a step, on the shardings of `target` (arrays, or shapes with shardings).

        Args:
            step: None restores the newest intact one, and renames damaged ones after it to `<step>.damaged`.

        Raises:
            ValueError: the checkpoint, or every checkpoint, is damaged or of another model.
            OSError, MemoryError: a checkpoint cannot be read, although it may be intact.
        """
        steps = [saved for saved in sorted(self._manager.all_steps(), reverse=True) if step in (None, saved)]
        if not steps:
            which = "" if step is None else f" of step {step}"
            raise FileNotFoundError(f"there is no checkpoint{which} in {self.folder}.")
        damaged = {}
        for candidate in steps:
            try:
                state = read_checkpoint(self.folder / str(candidate), target)
            except DamagedError as error:
                damaged[candidate] = error
            else:
                for other, error in damaged.items():
                    self._set_aside(other)
                    self.notify(f"{error}. It was renamed to {other}.damaged; the run resumes from step {candidate}.")
                return state
        newest, *others = damaged
        rest = f"; those of steps {', '.join(map(str, others))} cannot be restored either" if others else ""
        raise DamagedError(f"{damaged[newest]}{rest}") from damaged[newest].__cause__

    def _set_aside(self, step):
        if jax.process_index() == 0:
            aside = self.folder / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)
        sync_global_devices("set aside")
        self.reload()

    def wait(self) -> None:
        """Wait until everything is written; raises the errors of `save`."""
        with self._os_errors():
            self._manager.wait_until_finished()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if distributed.is_lost_process(error):  # Orbax would wait for it
            return
        try:
            with self._os_errors():
                self._manager.close()
        except OSError:
            if not isinstance(error, MovedError):  # which also made the save fail
                raise
        if self._failed:  # Orbax may have written other parts of that checkpoint after its error
            clean(self.folder.parent)

    @contextlib.contextmanager
    def _os_errors(self):
        try:
            yield
        except jax.errors.JaxRuntimeError:  # raised by the computation of the state
            raise
        except Exception as error:  # Orbax raises exceptions of many types, including from its threads
            if lost := next(filter(distributed.is_lost_process, (error, error.__cause__)), None):
                raise lost from None  # the cause, if Orbax raises a TimeoutError
            number = error_number(error)
            reason = os.strerror(number) if number else " ".join(str(error).split())[:300]
            raise OSError(
                f"a checkpoint could not be written to {self.folder} ({reason}). Existing checkpoints are kept."
            ) from error


def retried(list_checkpoints: Callable[[], Any]) -> Any:
    """Return the result of a function that lists checkpoints, which a run in progress may delete meanwhile."""
    for _ in range(4):
        with contextlib.suppress(FileNotFoundError):
            return list_checkpoints()
    return list_checkpoints()


def _barrier() -> Callable[..., None]:
    """Return Orbax's barrier of all processes, at which a process whose save has failed does not wait.

    Orbax would wait in a `finally` block, before it reports the error, for the others, which wait for the save. Runs of
    several processes never start a save while they handle an exception, so that an exception here is that of the save.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(**options):
        if sys.exc_info()[0] is None:
            wait(**options)

    return barrier


def clean(workdir: Path) -> None:
    """Delete the leftovers of interrupted saves."""
    if jax.process_index() == 0:
        for folder in (workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*workdir.glob(".*.partial"), *workdir.glob("artifacts/.*.partial")):
            file.unlink(missing_ok=True)
