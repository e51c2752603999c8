"""One run over several processes gives what one process gives, and ends as it should when one of them does."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

hosts = runpy.run_path(str(Path(__file__).with_name("hosts.py")))


@pytest.fixture(scope="session")
def start_all(environment):
    """start_all(count, *arguments) starts the processes of a run, four devices in all.

    A command of Python is given first; for what {coordinator}, {count} and {number} stand is put in.
    """

    def start_all(count, *command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        flags = f"--xla_force_host_platform_device_count={4 // count} {environment['XLA_FLAGS']}"
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([str(root), environment["PYTHONPATH"]])
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    *(str(part).format(coordinator=coordinator, count=count, number=i) for part in command),
                ],
                cwd=root,
                env=environment | {"XLA_FLAGS": flags, "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(count)
        ]

    return start_all


def outputs_of(processes, seconds=600):
    """What processes print, when they have ended."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process with one device finds, by run, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("alone")
    hosts["write_pairs"](folder)
    return {name: hosts["follow"](name, folder / name, devices=jax.devices()[:1]) for name in hosts["RUNS"]}, folder


def follow(start_all, count, folder, before):
    """What each of several processes finds; they also evaluate what is in the folder `before`."""
    script = Path(__file__).with_name("hosts.py")
    processes = start_all(count, script, "{coordinator}", "{count}", "{number}", folder, before)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0] * count, outputs
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]


def check(found, expected, name):
    """Several processes found what one did, and each has read its share."""
    shares = [each[name] for each in found]
    for share in shares:
        np.testing.assert_allclose(share["losses"][:1], expected["losses"][:1], rtol=1e-6)
        np.testing.assert_allclose(share["losses"], expected["losses"], rtol=1e-4)
        assert share["evaluated"] == shares[0]["evaluated"]
        assert share["evaluated_alone"] == pytest.approx(expected["evaluated"], rel=1e-5)
    for number, rows in enumerate(expected["rows"]):
        read = [share["rows"][number] for share in shares]
        if name == "tensor":  # every process computes a part of every example
            assert all(part == rows for part in read)
        else:
            assert [row for part in read for row in part] == rows
            assert len({len(part) for part in read}) == 1


def test_two_processes_give_what_one_gives(start_all, alone, tmp_path):
    expected, folder = alone
    found = follow(start_all, 2, tmp_path, folder)
    for name in hosts["RUNS"]:
        check(found, expected[name], name)
