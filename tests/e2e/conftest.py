"""Fixtures that run the command line in separate processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import no_report, tiny  # noqa: F401 (fixtures)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Return environment variables that make processes start quickly."""
    # A process starts sooner without torch, which TensorBoard's writer imports if it is installed, and with less
    # optimization.
    stubs = tmp_path_factory.mktemp("stubs")
    (stubs / "torch.py").write_text("raise ImportError('left out')\n")
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return dict(os.environ) | flags | {"PYTHONPATH": str(stubs)}


@pytest.fixture(scope="session")
def start(environment):
    """Return `start(*arguments)`, which runs `python launch.py` on one simulated device with merged output streams."""

    def start(*arguments):
        command = [sys.executable, "launch.py", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    return start


@pytest.fixture(scope="session")
def start_all(environment, tmp_path_factory):
    """Return `start_all(count, *command)`, which starts the processes of a run with four, or `devices`, in total.

    {coordinator}, {count} and {number} in the command are replaced by their values.
    """
    compiled = str(tmp_path_factory.mktemp("compiled"))

    def start_all(count, *command, devices=4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            values = {"coordinator": f"127.0.0.1:{free.getsockname()[1]}", "count": count}
        flags = f"--xla_force_host_platform_device_count={devices // count} {environment['XLA_FLAGS']}"
        paths = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
        cache = {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        return [
            subprocess.Popen(
                [sys.executable, *(str(part).format(number=number, **values) for part in command)],
                cwd=ROOT,
                env=environment | cache | {"XLA_FLAGS": flags, "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(count)
        ]

    return start_all


def outputs_of(processes, seconds=900):
    """Wait for processes to end and return their outputs."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="session")
def launch(start):
    """Return `launch(*arguments)`, which runs `python launch.py` and returns (exit code, output)."""

    def launch(*arguments):
        process = start(*arguments)
        output = process.communicate(timeout=900)[0]
        return process.returncode, output

    return launch


@pytest.fixture(scope="session")
def finished(launch, tmp_path_factory):
    """Return the workdir of an uninterrupted run with the arguments `RUN`."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    code, output = launch(*RUN, f"--workdir={workdir}")
    assert code == 0, output
    return workdir


# Dropout and samples, so that random numbers are part of the comparison.
RUN = (
    f"--config={ROOT}/tests/tiny.py:gpt",
    "--config.model.dropout=0.1",
    "--config.sampling.num_samples=2",
    "--config.ema_decay=0.9",
)


@pytest.fixture(scope="session")
def run_arguments():
    return RUN
