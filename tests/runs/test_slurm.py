"""Commands on SLURM jobs, with programs in place of a cluster (a real one: `tests/e2e/test_slurm.py`)."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lineage.configs import cli
from lineage.configs.atomic import sealed
from lineage.runs import locks, slurm
from lineage.runs.live import Run
from lineage.runs.process import PREEMPTED

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return `cluster(name, script)`, which puts a shell script in place of a program."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def cluster(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return cluster


@pytest.fixture(scope="module")
def submitit():
    """Import submitit before `capsys` replaces the standard streams, which it would close."""
    return pytest.importorskip("submitit")


def test_numbers_of_jobs_are_written_atomically(cluster, tmp_path, monkeypatch):
    """Check that a full disk does not cost the numbers of earlier jobs, and that runs in the queue are not repeated."""
    cluster("squeue", '[ "$SQUEUE_STATES" ] || { echo 7_0 PENDING; echo 7_1 PENDING; }')
    monkeypatch.setenv("SQUEUE_STATES", "running")  # filters the output of squeue
    submitted = []

    def submit_array(tasks):
        submitted.append(len(tasks))
        return [SimpleNamespace(job_id="7_1") for _ in tasks]

    monkeypatch.setattr(slurm, "_executor", lambda *_: SimpleNamespace(submit_array=submit_array))
    path = tmp_path / "slurm" / slurm.JOBS
    path.parent.mkdir()
    path.write_text('{"a": "7_0"}')
    runs = [Run(name, tmp_path / name) for name in "ab"]
    with monkeypatch.context() as patch:

        def fsync(file):
            if submitted:
                raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="No space left on device"):
            slurm.submit(runs, ["x"], tmp_path, {})
    assert json.loads(path.read_text()) == {"a": "7_0"}
    for _ in range(2):
        assert slurm.submit(runs, ["x"], tmp_path, {}) == PREEMPTED
    assert json.loads(path.read_text()) == sealed({"a": "7_0", "b": "7_1"})
    assert submitted == [1, 1]
    with locks.locked_file(path.parent / locks.LOCK), pytest.raises(ValueError, match="another `slurm submit`"):
        slurm.submit(runs, ["x"], tmp_path, {})


def test_job_in_the_queue_with_another_config_is_reported(cluster, tmp_path, monkeypatch, capsys):
    cluster("squeue", "echo 7_0 PENDING")
    submitted = [SimpleNamespace(job_id="7_0")]
    monkeypatch.setattr(slurm, "_executor", lambda *_: SimpleNamespace(submit_array=lambda tasks: submitted))
    (tmp_path / "slurm").mkdir()
    first, again, other = (Run("a", tmp_path / "a", {}, config) for config in ({"seed": 1}, {"seed": 1}, {"seed": 2}))
    again.config["cluster"] = {"minutes": 9}
    for run in (first, again):
        assert slurm.submit([run], ["x"], tmp_path, {}) == PREEMPTED
    assert "0 of 1 runs submitted" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^job 7_0 of a is in the queue with another config \(1 of 1 runs\): "):
        slurm.submit([other], ["x"], tmp_path, {})
    cluster("squeue", "")
    assert slurm.submit([other], ["x"], tmp_path, {}) == 1
    assert "1 of 1 runs submitted" in capsys.readouterr().out


def test_run_in_the_queue_is_not_submitted_again_if_the_sweep_has_another_key(cluster, tmp_path, monkeypatch, capsys):
    """Check that such a run keeps its name until another run has its folder."""
    cluster("squeue", "echo 7_0 PENDING; echo 7_1 PENDING")
    numbers = iter(["7_0", "7_1", "8_0"])
    executor = SimpleNamespace(submit_array=lambda tasks: [SimpleNamespace(job_id=next(numbers)) for _ in tasks])
    monkeypatch.setattr(slurm, "_executor", lambda *_: executor)
    overrides = [{"seed": 1}, {"seed": 2}]
    configs = [{"seed": 1, "width": 4}, {"seed": 2, "width": 4}]
    slurm.submit(slurm.plan(overrides, configs, tmp_path), ["x"], tmp_path, {})
    overrides = [*(changes | {"width": 4} for changes in overrides), {"seed": 2, "width": 8}]
    configs.append({"seed": 2, "width": 8})
    runs = slurm.plan(overrides, configs, tmp_path)
    assert [run.name for run in runs] == ["seed=1", "seed=2", "seed=2,width=8"]
    slurm.submit(runs, ["x"], tmp_path, {})
    assert "1 of 3 runs submitted" in capsys.readouterr().out
    (tmp_path / "seed=1").mkdir()
    (tmp_path / "seed=1" / "config.json").write_text('{"seed": 3}')
    assert slurm.plan(overrides, configs, tmp_path)[0].name == "seed=1,width=4"


@pytest.mark.parametrize("program", ["squeue", "scancel"])
def test_program_that_hangs_is_not_waited_for_forever(program, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "ANSWER_SECONDS", 0.3)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text('{"a": "7"}')
    cluster("squeue", "echo 7 RUNNING")
    cluster(program, "sleep 20 & wait")  # the process that it started keeps its output open
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"{program} has not answered within 0.3 s"):
        slurm.cancel(tmp_path)
    assert time.monotonic() - start < 10


def test_run_whose_job_is_ending_is_not_said_to_be_in_the_queue(cluster, tmp_path, monkeypatch, capsys):
    """Check that a user who submits again right after `slurm cancel` learns that the run is not continued yet."""
    cluster("squeue", "echo 7_0 COMPLETING; echo 7_1 RUNNING")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "7_0", "b": "7_1"}))
    monkeypatch.setattr(slurm, "_executor", lambda *_: None)
    for names, note in (("ab", "jobs of 1 runs are ending: submit again when they have ended"), ("b", "")):
        runs = [Run(name, tmp_path / name) for name in names]
        assert slurm.submit(runs, ["x"], tmp_path, {}) == PREEMPTED
        shown = capsys.readouterr().out
        assert f"0 of {len(runs)} runs submitted" in shown
        assert note in shown
        assert ("ending" in shown) == bool(note)


def test_status_says_why_a_job_waits(cluster, tmp_path, capsys):
    cluster("squeue", "echo 7_0 PENDING Resources; echo 7_1 PENDING launch failed requeued held; echo 7_2 RUNNING None")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "7_0", "b": "7_1", "c": "7_2"}))
    assert slurm.status([Run(name, tmp_path / name) for name in "abc"], tmp_path) == PREEMPTED
    lines = [line.split(maxsplit=1)[1].strip() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert lines == ["pending (Resources)", "pending (launch failed requeued held)", "running"]


def test_lines_of_squeue_without_a_state_are_ignored(cluster, tmp_path, capsys):
    cluster("squeue", "echo; echo 8; echo 7 RUNNING; echo")
    cluster("scancel", "")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text('{"a": "7"}')
    assert slurm.cancel(tmp_path) == 0
    assert capsys.readouterr().out == "1 jobs canceled\n"


@pytest.mark.parametrize("ended", [False, True])
def test_all_jobs_are_canceled_even_if_one_has_ended(ended, cluster, tmp_path, capsys):
    cluster("squeue", "echo 7_0 PENDING; echo 7_1 RUNNING; echo 8 RUNNING")
    cluster("scancel", f"echo $@ >> {tmp_path}/canceled; [ $1 = 7_0 ] && echo no such job >&2; exit {int(ended)}")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "7_0", "b": "7_1", "c": "7_2", "d": [8]}))
    if ended:
        with pytest.raises(ValueError, match="scancel failed for some of 2 jobs: no such job"):
            slurm.cancel(tmp_path)
    else:
        assert slurm.cancel(tmp_path) == 0
        assert capsys.readouterr().out == "2 jobs canceled\n"
    assert (tmp_path / "canceled").read_text() == "7_0\n7_1\n"


def test_jobs_of_an_interrupted_submit_are_not_submitted_again(cluster, tmp_path, monkeypatch, capsys):
    """Check that jobs that SLURM has accepted, but whose numbers were not written, are reported and can be canceled."""
    script = tmp_path / "a run/slurm/.submission_file_1.sh"
    scripts, states = f'echo "7_0 {script}"; echo 8 /other/slurm/x.sh', "echo 7_0 RUNNING; echo 8 RUNNING"
    cluster("squeue", f'case "$*" in *%o*) {scripts};; *) {states};; esac')
    cluster("scancel", f"echo $@ >> {tmp_path}/canceled")
    monkeypatch.setattr(slurm, "_executor", lambda *_: None)
    workdir = tmp_path / "a run"
    with pytest.raises(ValueError, match="an interrupted `slurm submit` has submitted 7_0, in the queue but not in "):
        slurm.submit([Run("a", workdir)], ["x"], workdir, {})
    assert slurm.cancel(workdir) == 0
    assert (tmp_path / "canceled").read_text() == "7_0\n"
    (workdir / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "7_0"}))
    assert slurm.submit([Run("a", workdir)], ["x"], workdir, {}) == PREEMPTED
    assert "0 of 1 runs submitted" in capsys.readouterr().out


def test_folder_of_the_logs_exists_when_slurm_accepts_a_job(cluster, tmp_path):
    """Check that a job can start before `sbatch` returns: SLURM does not create the folder of a log."""
    pytest.importorskip("submitit")
    cluster("srun", "")
    cluster("squeue", "")
    cluster("sbatch", "[ -d $(dirname $(sed -n 's/^#SBATCH --output=//p' $1)) ] && echo Submitted batch job 7")
    settings = cli.load(f"{ROOT}/tests/tiny.py:vit")[0].cluster
    assert slurm.submit([Run("a", tmp_path / "a")], ["x"], tmp_path / "a", settings) == 1  # it is not in the queue
    assert json.loads((tmp_path / "a/slurm" / slurm.JOBS).read_text())["a"] == "7"


def test_sweep_of_more_jobs_than_an_array_may_have(cluster, tmp_path):
    pytest.importorskip("submitit")
    cluster("srun", "")
    cluster("squeue", "")
    cluster("sbatch", "echo 'Batch job submission failed: Invalid job array specification' >&2; exit 1")
    settings, runs = cli.load(f"{ROOT}/tests/tiny.py:vit")[0].cluster, [Run(name, tmp_path / name) for name in "ab"]
    with pytest.raises(ValueError, match=r"refuses the jobs: .*Invalid job array .* 2 jobs; .* MaxArraySize"):
        slurm.submit(runs, ["x"], tmp_path, settings)


def test_job_that_would_be_signaled_at_its_start_is_not_submitted(tmp_path):
    settings = cli.load(f"{ROOT}/tests/tiny.py:vit")[0].cluster
    settings.minutes = 2
    with pytest.raises(ValueError, match=r"^cluster.save_seconds is 120: it must be less than cluster.minutes, 2 x"):
        slurm.submit([], [], tmp_path, settings)


def test_status_tells_why_the_last_start_failed(cluster, tmp_path, monkeypatch, capsys):
    cluster("squeue", "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    folder = tmp_path / "run"
    for message in ("error: too large", "error: damaged"):
        with pytest.raises(RuntimeError, match="The run failed with exit code 1"):
            slurm.Task([sys.executable, "-c", f"import sys; sys.exit({message!r})", "\udcff"], str(folder))()
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"run": "7"}))
    run = Run("run", folder)
    assert slurm.status([run], tmp_path) == 1
    assert capsys.readouterr().out.endswith(f"\nrun: error: damaged ({folder / 'log.txt'})\n")
    slurm.Task([sys.executable, "-c", "print('stopped')"], str(folder))()
    assert run.error() == "stopped"


def test_status_tells_why_slurm_ended_a_job(cluster, tmp_path, monkeypatch, capsys):
    """Check a run that is killed, a job that SLURM kills with its run, and a job that fails before its run starts."""
    cluster("squeue", "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "7_0", "b": "7_1", "c": "7_2"}))
    logs = [tmp_path / "slurm" / f"7_{index}_0_log.err" for index in (0, 1, 2)]
    killed = "import os; print('step 3', flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(RuntimeError, match="The run failed with exit code -9"):
        slurm.Task([sys.executable, "-c", killed], str(tmp_path / "a"))()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.txt").write_text("$ x\nstep 3\n")
    (tmp_path / "c").mkdir()
    logs[1].write_text("slurmstepd-n1: error: Exceeded job memory limit\nsrun: error: n1: task 0: Killed\n")
    logs[2].write_text("Traceback\nModuleNotFoundError: No module named 'lineage'\n")
    assert slurm.status([Run(name, tmp_path / name) for name in "abc"], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "a: error: the run was killed by SIGKILL (" in shown
    assert f"b: slurmstepd-n1: error: Exceeded job memory limit ({logs[1]}) (" in shown
    assert f"c: ModuleNotFoundError: No module named 'lineage' ({logs[2]}) (" in shown


def test_status_tells_why_the_last_start_of_a_requeued_job_ended(submitit, cluster, tmp_path, capsys):
    """Check that messages of SLURM on earlier starts are not taken for the reason."""
    scripts = {"srun": "", "squeue": ""}
    scripts["sbatch"] = "sh $1 2> $(sed -n 's/^#SBATCH --error=//p' $1); echo Submitted batch job 7"
    for name, script in scripts.items():
        cluster(name, script)
    settings = cli.load(f"{ROOT}/tests/tiny.py:vit")[0].cluster
    settings.setup = ("echo loading modules >&2",)
    run = Run("a", tmp_path / "a")
    assert slurm.submit([run], ["x"], run.folder, settings) == 1
    start = (run.folder / "slurm" / "%j_0_log.err").read_text()
    assert start.endswith("loading modules\n")
    (run.folder / "log.txt").write_text("$ x\nstep 3\n")
    requeued, ended = "slurmstepd: error: JOB 7 CANCELLED DUE TO JOB REQUEUE", "Job not requeued because: timed-out"
    log = run.folder / "slurm" / "7_0_log.err"
    requeues_used_up = f"Traceback\nsubmitit.core.utils.UncompletedJobError: {ended}\nsrun: error"
    for last, reason in ((requeues_used_up, ended), ("", "step 3")):
        log.write_text(f"{start}{requeued}\nsrun: error\n{start}{last}\n")
        capsys.readouterr()
        assert slurm.status([run], run.folder) == 1
        shown = capsys.readouterr().out
        assert reason in shown
        assert "REQUEUE" not in shown


def test_queue_with_a_name_that_is_not_utf8(cluster, tmp_path):
    """Check that a job of another folder does not hinder the commands on this one."""
    cluster("squeue", r"""printf '9 /home/caf\351/x.sh\n'""")
    assert slurm.cancel(tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "message"), [("squeue", "squeue failed"), ("scancel", "scancel failed for some of 1")]
)
def test_program_that_fails_without_a_message(name, message, cluster, tmp_path):
    cluster("squeue", "echo 8 RUNNING")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"a": "8"}))
    cluster(name, "exit 1")
    with pytest.raises(ValueError, match=f"{message}.*: there is no message"):
        slurm.cancel(tmp_path)


def test_status_of_a_job_that_was_canceled_before_its_start(cluster, tmp_path, capsys):
    cluster("squeue", "")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / slurm.JOBS).write_text(json.dumps({"run": "7"}))
    assert slurm.status([Run("run", tmp_path / "run")], tmp_path) == 1
    assert capsys.readouterr().out == "run  not started (job 7)\n"


@pytest.mark.parametrize("state", ["not started", "ended"])
def test_job_is_requeued_without_a_run_to_stop(state, tmp_path):
    """Check a signal before the run has started, and one that the run has received, and obeyed, before the job."""
    pytest.importorskip("submitit")
    task = slurm.Task([sys.executable, "-c", ""], str(tmp_path))
    if state == "ended":
        task.process = subprocess.Popen(task.command)
        os.waitid(os.P_PID, task.process.pid, os.WEXITED | os.WNOWAIT)
    requeued = task.checkpoint().function
    assert (requeued.command, requeued.folder, requeued.process) == (task.command, str(tmp_path), None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_job_forwards_signals_to_its_run(number, tmp_path):
    """Check that a signal such as that of `scancel --signal=USR1` does not end the job before its run has saved."""
    run = f"import signal, sys, time; signal.signal({number}, lambda *_: sys.exit(75)); print('ready'); time.sleep(60)"
    code = f"from lineage.runs.slurm import Task; Task([{sys.executable!r}, '-uc', {run!r}], {str(tmp_path)!r})()"
    with subprocess.Popen([sys.executable, "-c", code]) as job:
        while not (tmp_path / "log.txt").exists() or "\nready" not in (tmp_path / "log.txt").read_text():
            time.sleep(0.05)
        job.send_signal(number)
    assert job.returncode == 0


def test_run_that_ends_before_a_signal_is_handled_does_not_fail(tmp_path, monkeypatch):
    """Check that a job does not wait again for a run for which the handler of SIGTERM has waited."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    wait = os.waitid

    def waitid(*arguments):
        wait(*arguments)
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        return wait(*arguments)

    monkeypatch.setattr(os, "waitid", waitid)
    slurm.Task([sys.executable, "-c", "import sys; sys.exit(75)"], str(tmp_path))()
