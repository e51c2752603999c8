"""A real SLURM cluster of one machine, for tests."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={port}
SlurmdPort={other}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1
KillWait=60
ReturnToService=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    """Return whether a cluster can be started, which only root can."""
    return not os.getuid() and all(map(shutil.which, (*DAEMONS, "sbatch")))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster with its files in a folder; yield the environment variables of its commands."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    ports = {"port": free_port(), "other": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, cpus=os.cpu_count(), **ports))
    environment = os.environ | {"SLURM_CONF": str(conf)}
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in files.items())]
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        for daemon, options in zip(DAEMONS, (munged, ["-D", "-c"], ["-D"])):
            stack.callback(stop, subprocess.Popen([daemon, *options], **quiet))
        wait_for(lambda: "idle" in answer(environment, "sinfo", "--format=%T"), 60)
        yield environment


def stop(daemon: subprocess.Popen) -> None:
    """Stop a daemon, which may be waiting for a job of a failed test."""
    daemon.terminate()
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()


def answer(environment: dict[str, str], command: str, *options: str) -> str:
    """Return the output of a SLURM command without its header."""
    return subprocess.run([command, "--noheader", *options], env=environment, capture_output=True, text=True).stdout


def restart_now(environment: dict[str, str], job: str) -> None:
    """Start a requeued job at once, instead of after the two minutes of SLURM.

    Wait for some seconds first, because otherwise the node confuses the new start with the one that has just ended.
    """
    wait_for(lambda: "PENDING" in answer(environment, "squeue", "--format=%T", f"--job={job}"))
    time.sleep(5)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environment, check=True)


def wait_for(condition, seconds=240):
    """Return the first true value of a function; raise AssertionError after some seconds without one."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.3)
    return result


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
