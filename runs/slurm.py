"""Runs as jobs of a SLURM cluster, through submitit: submission, requeueing, states and cancellation."""

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lineage.configs.atomic import without_links, write_record
from lineage.runs import sweep
from lineage.runs.folder import CONFIG, read_json
from lineage.runs.live import LOG, PROMPT, Run, Table, digest, print_failures, tail
from lineage.runs.locks import LOCK, locked_file
from lineage.runs.process import ERROR, PREEMPTED, STOP_SIGNALS
from lineage.runs.supervisor import reason

JOBS = "jobs.json"  # in the folder `slurm` of a workdir; maps the name of a run to its SLURM job number
CONFIGS = "configs.json"  # likewise; maps the name of a run to the SHA-256 of the config that it was submitted with
START = "starting the job"  # printed to the log of errors at each start, because a requeued job appends to its logs
ANSWER_SECONDS = 300  # to wait for `squeue` and `scancel`, which repeat failed requests themselves


class Task:
    """Run that submitit calls in every task of a job; `checkpoint` is called before the time limit.

    The other `STOP_SIGNALS` are forwarded to the run. Depending on how it tracks processes, the cluster may also signal
    the run itself; repeated signals do no harm.
    """

    def __init__(self, command: Sequence[str], folder: str):
        self.command, self.folder = list(command), folder
        self.process: subprocess.Popen | None = None

    def __call__(self) -> None:
        """Run the command until it ends, by itself or after a signal; raise RuntimeError if it failed."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with open(Path(self.folder) / LOG, "ab", buffering=0, opener=without_links) as log:
            if os.environ.get("SLURM_PROCID", "0") == "0":
                log.write(os.fsencode(f"{PROMPT}{shlex.join(self.command)}\n"))
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for number in STOP_SIGNALS:
            if number == signal.SIGTERM or signal.getsignal(number) is signal.SIG_DFL:  # the others are submitit's
                signal.signal(number, lambda received, frame: self.process.send_signal(received))
        self._wait()
        code = self.process.wait()
        stopped = (PREEMPTED, *(-number for number in STOP_SIGNALS))  # the signals: stopped before the first step
        if code and code not in stopped:  # a failed task might end the others before the first has the job requeued
            if code < 0:
                with suppress(OSError), open(Path(self.folder) / LOG, "a", opener=without_links) as log:
                    print(f"\n{ERROR}the run was {reason(code)}", file=log)
            raise RuntimeError(f"The run failed with exit code {code}: see {Path(self.folder) / LOG}.")

    def checkpoint(self) -> Any:
        """Stop the run after it has saved; return the task that submitit requeues."""
        from submitit.helpers import DelayedSubmission

        if self.process:  # otherwise, the signal has come before the run was started
            self.process.terminate()
            self._wait()
        return DelayedSubmission(Task(self.command, self.folder))

    def _wait(self):
        """Wait until the run has ended. A signal handler cannot call `Popen.wait` while another call is waiting."""
        with suppress(ChildProcessError):  # `Popen.terminate` waits for a process that has ended
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def __getstate__(self):
        return self.__dict__ | {"process": None}


def plan(overrides: Sequence[Mapping[str, Any]], configs: Sequence[Mapping[str, Any]], workdir: Path) -> list[Run]:
    """Return the runs of a sweep (see `sweep.plan`); those that were submitted and have not started keep their names.

    Other overrides of a sweep, such as one more key, would give them other names, and they would be submitted again.
    """
    names = read_json(workdir / "slurm" / CONFIGS).items()
    waiting = {value: name for name, value in names if not (workdir / name / CONFIG).exists()}
    return sweep.plan(overrides, configs, workdir, waiting)


def submit(runs: Sequence[Run], command: Sequence[str], workdir: Path, settings: Mapping[str, Any]) -> int:
    """Submit runs as an array of jobs, except those that are done or in the queue; return the exit code of `status`.

    A run that is in the queue with another config raises ValueError.

    `command` is the part of the command line that all runs share. The scripts and logs of SLURM and `jobs.json` are
    written to the folder `slurm/` of the workdir. The settings are the section `cluster` of the config.
    """
    folder = (workdir / "slurm").absolute()
    if not str(folder).isprintable() or {*"%\\"} & {*str(folder)}:  # lines of the script, codes in names of its logs
        raise ValueError(
            f"workdir is {str(workdir)!r}: it must not have line breaks, other control characters, % or backslashes."
        )
    executor = _executor(folder, settings)
    with locked_file(folder / LOCK) as free:
        if not free:
            raise ValueError(f"another `slurm submit` is using {workdir}: try again when it has ended.")
        jobs, queue = _jobs(folder), _queue()
        if unrecorded := _unrecorded(folder, jobs):
            raise ValueError(
                f"an interrupted `slurm submit` has submitted {', '.join(unrecorded)}, in the queue but not in "
                f"{folder / JOBS}: cancel these jobs with `slurm cancel`, and submit again when they have ended."
            )
        todo = [run for run in runs if not run.is_done()]
        configs, wanted = read_json(folder / CONFIGS), {run.name: digest(run.config) for run in todo}
        queued = {run.name for run in todo if jobs.get(run.name) in queue}
        if other := [name for name in sorted(queued) if configs.get(name, wanted[name]) != wanted[name]]:
            raise ValueError(
                f"job {jobs[other[0]]} of {other[0]} is in the queue with another config ({len(other)} of {len(runs)} "
                "runs): cancel it with `slurm cancel`, wait for its end, or choose another workdir."
            )
        todo = [run for run in todo if run.name not in queued]
        tasks = [Task(run.command(command), str(run.folder.absolute())) for run in todo]
        if tasks:
            write_record(folder / CONFIGS, configs | {run.name: wanted[run.name] for run in todo})
            try:
                numbers = [job.job_id for job in executor.submit_array(tasks)]
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # submitit's errors are RuntimeErrors
                refusal = f"SLURM refuses the jobs: {_brief(str(error))}"
                if "array" in refusal:
                    refusal += f" (there are {len(tasks)} jobs; `scontrol show config` prints MaxArraySize)"
                raise ValueError(refusal) from error
            jobs |= {run.name: number for run, number in zip(todo, numbers)}
            write_record(folder / JOBS, jobs)
    print(f"{len(tasks)} of {len(runs)} runs submitted; the others are done or in the queue")
    if ending := [name for name in queued if queue[jobs[name]] == "COMPLETING"]:  # such as jobs just canceled
        print(f"the jobs of {len(ending)} runs are ending: submit again when they have ended, to continue these runs")
    return status(runs, workdir)


def status(runs: Sequence[Run], workdir: Path) -> int:
    """Print the states of runs, and why some wait or failed.

    Returns:
        0 if all are done, 1 if some failed, were not submitted or did not start, 75 otherwise.
    """
    jobs, queue = _jobs(workdir / "slurm"), _squeue("%i %T %r")
    for run in runs:
        number = jobs.get(run.name)
        run.look()
        ended = "failed or canceled" if run.folder.exists() else "not started"
        ended = "not submitted" if number is None else f"{ended} (job {number})"
        state, _, cause = queue[number].partition(" ") if number in queue else (ended, "", "")
        run.state = "done" if run.is_done() else state.lower() + (f" ({cause})" if cause not in ("", "None") else "")
        if run.state.startswith("failed"):
            run.ended = _reason_of_end(run, workdir / "slurm" / f"{number}_0_log.err")
    with Table() as table:
        table.show(runs)
    print_failures(runs)
    states = {run.state for run in runs}
    if states == {"done"}:
        return 0
    return 1 if any(state.startswith(("failed", "not")) for state in states) else PREEMPTED


def cancel(workdir: Path) -> int:
    """Cancel the waiting and running jobs of a workdir; running jobs save first."""
    queue, folder = _queue(), (workdir / "slurm").absolute()
    jobs = _jobs(folder)
    active = [number for number in (*jobs.values(), *_unrecorded(folder, jobs)) if number in queue]
    errors = []
    for running in (False, True):
        if chosen := [number for number in active if (queue[number] == "RUNNING") == running]:
            done = _answer(["scancel", *chosen])
            errors += [done.stderr] if done.returncode else []
    if errors:  # for example, a job has ended meanwhile
        raise ValueError(f"scancel failed for some of {len(active)} jobs: {_brief(' '.join(errors))}")
    print(f"{len(active)} jobs canceled")
    return 0


def _executor(folder, settings):
    save, minutes = settings["save_seconds"], settings["minutes"]
    if save >= 60 * minutes:  # the run would be signaled at its start, and requeued after every step
        raise ValueError(f"cluster.save_seconds is {save}: it must be less than cluster.minutes, {minutes} x 60 s.")
    try:
        import submitit
    except ModuleNotFoundError:
        raise ModuleNotFoundError("slurm needs submitit: pip install submitit.") from None
    names = ("nodes", "cpus_per_task", "gpus_per_node", "partition", "account", "qos", "constraint")
    limits = {name: settings[name] for name in names if settings[name]}
    if settings["memory_gb"]:
        limits["mem"] = f"{settings['memory_gb']}GB"
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=settings["requeues"])
    except RuntimeError:
        raise FileNotFoundError("this machine has no SLURM: there is no srun.") from None
    limits |= {"time": settings["minutes"], "signal_delay_s": settings["save_seconds"]}
    limits |= {"ntasks_per_node": settings["tasks_per_node"], "array_parallelism": settings["parallel"] or 1_000_000}
    limits |= {"setup": [f"echo '{START}' >&2", *settings["setup"]], "additional_parameters": {"requeue": True}}
    executor.update_parameters(**limits, job_name=folder.parent.name)
    return executor


def _reason_of_end(run: Run, log: Path) -> str:
    """Return SLURM's last message on the last start of a job, such as that on a memory limit, "" if there is none.

    If the run has no log, return the last line of the job's, such as that of an error at its start.
    """
    lines = tail(log).rpartition(f"{START}\n")[2].splitlines()
    ends = ("slurmstepd", "submitit.core.utils.UncompletedJobError")  # the latter: it may not be requeued again
    messages = [line for line in lines if line.startswith(ends)] or ([] if run.tail() else lines)
    return f"{messages[-1]} ({log})" if messages else ""


def _brief(messages: str) -> str:
    """Return the messages of a program in one line."""
    return " ".join(messages.split())[:300] or "there is no message"


def _jobs(folder: Path) -> dict[str, str]:
    """Return the number of each run's job."""
    return {name: str(number) for name, number in read_json(folder / JOBS).items()}


def _unrecorded(folder: Path, jobs: Mapping[str, str]) -> list[str]:
    """Return the numbers of jobs in the queue whose scripts are in the folder and which are not among `jobs`.

    They are those of a `submit` that ended after SLURM had accepted its jobs, for example because the disk was full.
    """
    scripts = _squeue("%i %o")
    numbers = [number for number, script in scripts.items() if os.path.dirname(script) == str(folder)]
    return [number for number in numbers if number not in jobs.values()]


def _queue() -> dict[str, str]:
    """Return the states of this user's waiting and running jobs by number, NUMBER_INDEX in an array."""
    return _squeue("%i %T")


def _squeue(columns: str) -> dict[str, str]:
    """Return the other columns of the queue of this user by the first."""
    command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", f"--format={columns}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}  # filters
    done = _answer(command, environment)
    if done.returncode:
        raise ValueError(f"squeue failed: {_brief(done.stderr)}")
    rows = (line.split(maxsplit=1) for line in done.stdout.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def _answer(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `squeue` or `scancel`."""
    # Jobs of other folders may have names that are not UTF-8.
    settings = {"capture_output": True, "text": True, "errors": "replace", "timeout": ANSWER_SECONDS}
    try:
        return subprocess.run(command, env=environment, **settings)
    except FileNotFoundError:
        raise FileNotFoundError(f"this machine has no SLURM: there is no {command[0]}.") from None
    except subprocess.TimeoutExpired:
        waited = f"{ANSWER_SECONDS} s"
        raise ValueError(f"{command[0]} has not answered within {waited}: try again when SLURM responds.") from None
