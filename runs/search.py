"""Hyperparameter search: Optuna chooses the overrides of each run from the results of earlier ones."""

import importlib.util
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lineage.configs.atomic import naming, regular
from lineage.runs.folder import METRICS, STORAGE, make
from lineage.runs.live import Run
from lineage.runs.locks import held, locked, unmoved
from lineage.runs.process import NO_MEMORY, NOT_FINITE, PREEMPTED, UNKNOWN_METRIC
from lineage.runs.sweep import Launcher, exit_code

NOT_REPEATED = (NOT_FINITE, NO_MEMORY)  # exit codes of deterministic errors, which are not retried
MAX_FAILED = 5  # number of runs after which a search ends if all of them have failed
INTERRUPTED = ("stopped", "failed (-")  # beginnings of the states of runs that a signal ended


def run_search(
    command: Sequence[str],
    search: Any,
    config_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    workdir: Path,
    finish: Callable[..., None],
    parallel: int = 1,
) -> int:
    """Run `command` in `workdir/trial_N` with values chosen by TPE (Bergstra et al., 2011); return the exit code.

    A run is stopped if its metric at an evaluation is worse than the median of the earlier runs at that step. The state
    of the search is in `workdir/optuna.journal`: after an interruption, the search and its runs continue. A run that a
    signal ended is repeated at once, other failed ones by the next call, unless they failed because of a non-finite
    loss or a lack of memory. If the first runs all fail, no others are started. A complete search without a finite
    value raises ValueError.

    The objective `search` is a `configs.sweeps.Search`; `config_of` returns the config of a run for its overrides. See
    `run_sweep` for the other arguments. Without a `checkpoint.best` in the config, the runs keep the best checkpoint by
    the metric.
    """
    if search is None:
        raise ValueError("this config has no search(), which returns a Search (see configs/sweeps.py).")
    if importlib.util.find_spec("optuna") is None:
        raise ModuleNotFoundError("sweep --optuna needs Optuna, which is not installed: `pip install optuna`.")
    if config_of({}).get("checkpoint", {}).get("best") == "":  # runs refuse an unknown metric at their start
        best = {"checkpoint.best": search.metric, "checkpoint.best_is_highest": search.maximize}
        command = [*command, *(f"--config.{key}={value}" for key, value in best.items())]
        given, config_of = config_of, lambda changes: given({**best, **changes})
    make(workdir)
    with locked(workdir):
        trials = Trials(search, config_of, workdir)
        Launcher(command, parallel, trials.observe).run(trials.todo(), trials.runs, unmoved(workdir))
        if trials.runs:
            finish(trials.runs, command, workdir, (search.metric, search.maximize))
    code = PREEMPTED if trials.has_more() else exit_code(trials.runs)
    if code == 0 and not trials.study.get_trials(states=[trials.states.COMPLETE]):
        raise ValueError(f"none of the {len(trials.runs)} runs ended with a finite {search.metric}.")
    return code


class Trials:
    """Optuna's trials and their runs."""

    def __init__(self, search: Any, config_of: Callable, workdir: Path):
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        self.search, self.config_of, self.workdir = search, config_of, workdir
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = regular(workdir / STORAGE)
        if path.is_symlink():  # in somebody else's folder, it may lead to a file of the user, which would be changed
            raise ValueError(f"{path} is a link, and the file that it leads to would be changed: delete the link.")
        # An existing lock was left by a killed search, since `locked` excludes concurrent searches.
        path.with_name(f"{STORAGE}.lock").unlink(missing_ok=True)
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # drop an incomplete last line
        pruner = optuna.pruners.MedianPruner(search.startup) if search.prune else optuna.pruners.NopPruner()
        settings = {"direction": "maximize" if search.maximize else "minimize", "pruner": pruner}
        try:
            journal = JournalFileBackend(str(path))
            journal.append_logs = naming(path)(journal.append_logs)  # on a full disk
            storage = JournalStorage(journal)
            self.study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True, **settings)
            known = self.study.get_trials()
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {str(error)[:100]}): restore it, or delete it to make the "
                "search choose its values again."
            ) from error
        self._check_objective(known)
        # constant_liar avoids the values of runs in progress.
        self.sampler = partial(optuna.samplers.TPESampler, n_startup_trials=search.startup, constant_liar=True)
        self.states = optuna.trial.TrialState
        self.trials: dict[Run, optuna.trial.Trial] = {}
        self.reported: dict[Run, set[int]] = defaultdict(set)  # steps whose values were reported
        self.repeated: set[Run] = set()  # runs of trials that have ended
        self.runs: list[Run] = []
        for stored in known:
            ended, keys = stored.state.is_finished(), stored.params.keys()
            if not keys <= search.space.keys() or (ended and keys != search.space.keys()):
                raise ValueError(
                    f"{workdir} holds a search over other keys ({', '.join(keys)}): choose another workdir."
                )
            run = self.add(optuna.trial.Trial(self.study, stored._trial_id))
            self.reported[run].update(stored.intermediate_values)
            was_pruned = stored.state == self.states.PRUNED
            if ended and not was_pruned and not run.facts():  # its folder was lost: repeat the run
                self.repeated.add(run)
            elif ended:
                run.check_config()
                run.state = "pruned" if was_pruned else "done"
                run.look()

    def _check_objective(self, known):
        """Raise ValueError if the trials have values of another metric, or the search has another direction."""
        maximize, metric = self.study.direction.name == "MAXIMIZE", self.search.metric
        if not any(stored.values or stored.intermediate_values for stored in known):
            self.study.set_user_attr("metric", metric)
        before = self.study.user_attrs.get("metric", metric)  # earlier versions did not record it
        if (before, maximize) != (metric, self.search.maximize):
            pairs = (maximize, before), (self.search.maximize, metric)
            old, new = (f"{'highest' if high else 'lowest'} {name}" for high, name in pairs)
            raise ValueError(f"{self.workdir} holds a search for the {old}, not for the {new}: choose another workdir.")

    def add(self, trial: Any) -> Run:
        """Return the run of a trial; a trial that already has its values keeps them.

        Each value has its own seed, so an interrupted search chooses the same values as an uninterrupted one.
        """
        changes = {}
        for key, values in self.search.space.items():
            seed = random.Random(f"{self.search.seed} {trial.number} {key}").getrandbits(32)
            self.study.sampler = self.sampler(seed=seed)
            try:
                changes[key] = values.suggest(trial, key)
            except ValueError:
                if key not in trial.params:
                    raise
                raise ValueError(
                    f"{key} has other choices or another type or `log` than in the search in {self.workdir}: undo the "
                    "change of search(), or choose another workdir."
                ) from None
        name = f"trial_{trial.number:03}"
        run = Run(name, self.workdir / name, changes, self.config_of(changes))
        self.trials[run] = trial
        self.runs.append(run)
        return run

    def todo(self) -> Iterator[Run]:
        """Yield the runs that have not ended (those in progress first), and then new runs.

        A run that was stopped or killed by a signal is repeated once before a new one: without its result, other values
        would be chosen than in an undisturbed search.
        """
        yield from sorted((run for run in self.runs if run.state == "waiting"), key=lambda run: not held(run.folder))
        again: set[Run] = set()
        while True:
            interrupted = (run for run in self.runs if run.state.startswith(INTERRUPTED) and run not in again)
            if run := next(interrupted, None):
                again.add(run)
                yield run
            elif self.has_more():
                yield self.add(self.study.ask())
            else:
                return

    def has_more(self) -> bool:
        """Return whether there are trials without a run, unless `MAX_FAILED` or more runs have ended and all failed."""
        all_failed = len(self.runs) >= MAX_FAILED and all(run.state.startswith("failed") for run in self.runs)
        return len(self.runs) < self.search.trials and not all_failed

    def observe(self, run: Run) -> bool:
        """Report a run's new values to Optuna; return whether the run should stop."""
        trial, metric = self.trials[run], self.search.metric
        try:
            values = {line["step"]: 0.0 + line[metric] for line in run.metrics if metric in line}
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{run.folder / METRICS} is damaged: {metric} is not a number ({error}).") from None
        for step in sorted(values.keys() - self.reported[run]):
            trial.report(values[step], step)
            self.reported[run].add(step)
        if run.state == "running":
            # Optuna counts the trials that have ended: a trial that was interrupted may be resumed after later ones.
            may_prune = run not in self.repeated and trial.number >= self.search.startup
            return may_prune and trial.should_prune()
        if run.state == "done":
            if not values:
                evaluated = ", ".join(sorted({key for line in run.metrics for key in line if "/" in key}))
                raise ValueError(f"search() has the metric {metric!r}; the metrics of the runs are {evaluated}.")
            value = list(values.values())[-1]
            result = {"values": value} if math.isfinite(value) else {"state": self.states.FAIL}
            self.study.tell(trial, **result, skip_if_finished=True)
        elif run.code == UNKNOWN_METRIC:  # later runs would fail in the same way
            raise ValueError(f"{run.name} has no such metric, and later runs would not either: {run.error()}")
        elif run.state == "pruned" or run.code in NOT_REPEATED:
            run.state = "pruned"
            self.study.tell(trial, state=self.states.PRUNED, skip_if_finished=True)
        return False
