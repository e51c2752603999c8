"""Runs over several processes match a run of one process, and end together when one process stops or dies."""

import json
import re
import resource
import runpy
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from lineage.models import convert
from lineage.runs.folder import read_metrics
from lineage.train import distributed, loop
from lineage.train.experiment import Experiment
from tests.e2e.conftest import outputs_of

ROOT = Path(__file__).parents[2]
hosts = runpy.run_path(str(Path(__file__).with_name("hosts.py")))


def alone(folder, names):
    """Return the single-process reference results by run name."""
    folder.mkdir()
    hosts["write_pairs"](folder)
    experiments = {name: hosts["experiment"](name, folder / name, devices=jax.devices()[:1]) for name in names}
    return {name: hosts["follow"](name, experiments[name], folder / name) for name in names}


def follow(start_all, count, folder, before, names):
    """Return the results of each of several processes, which also evaluate the states in the folder `before`."""
    folder.mkdir()
    script = Path(__file__).with_name("hosts.py")
    processes = start_all(count, script, "{coordinator}", "{count}", "{number}", folder, before, *names)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0] * count, outputs
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]


def check(results, expected):
    """Check that several processes match one process, and that each has read its share of the examples."""
    for name, single in expected.items():
        shares = [result[name] for result in results]
        for share in shares:
            np.testing.assert_allclose(share["losses"][:1], single["losses"][:1], rtol=1e-6)
            np.testing.assert_allclose(share["losses"], single["losses"], rtol=1e-4)
            assert share["evaluated"] == shares[0]["evaluated"]
            assert share["written"] == single["written"]
            assert share["evaluated_before"] == pytest.approx(single["evaluated"], rel=1e-5)
        for number, rows in enumerate(single["rows"]):
            read = [share["rows"][number] for share in shares]
            if name == "tensor":  # every process computes a part of every example
                assert all(part == rows for part in read)
            elif len(read) == 4 and name == "mixed":  # two processes share each half
                assert [read[0] + read[2], read[1] + read[3]] == [rows, rows]
            else:
                assert [row for part in read for row in part] == rows


@pytest.mark.thorough
def test_two_processes_match_one(start_all, tmp_path):
    names = "fsdp", "tensor"
    expected = alone(tmp_path / "one", names)
    check(follow(start_all, 2, tmp_path / "two", tmp_path / "one", names), expected)
    for name in names:  # neither of the two processes had the whole arrays
        experiment = hosts["experiment"](name, tmp_path / "one" / name, devices=jax.devices()[:1])
        assert int(hosts["restored"](experiment, tmp_path / "two" / name).step) == 20  # checksums are verified


@pytest.mark.slow
def test_four_processes_match_one(start_all, tmp_path):
    names = tuple(hosts["RUNS"])
    expected = alone(tmp_path / "one", names)
    four = follow(start_all, 4, tmp_path / "four", tmp_path / "one", names)
    check(four, expected)
    hosts["write_pairs"](tmp_path / "four")
    resumed = follow(start_all, 2, tmp_path / "two", tmp_path / "four", names)
    for name in names:  # saved by four processes, restored by two
        assert resumed[0][name]["evaluated_before"] == pytest.approx(four[0][name]["evaluated"], rel=1e-5)


def launch_all(start_all, count, workdir, *arguments):
    """Start a run of tests/tiny.py over several processes."""
    several = "--coordinator={coordinator}", "--num-processes={count}", "--process={number}", "--heartbeat=10"
    changes = "--config.total_steps=400", "--config.evaluate_every_steps=400", "--config.save_every_steps=10"
    changes += ("--config.model.depth=1",)
    config = f"--config={ROOT}/tests/tiny.py:gpt"
    return start_all(count, "launch.py", config, f"--workdir={workdir}", *several, *changes, *arguments)


def wait_for(workdir, step, processes):
    """Wait until a step is in the history."""
    path, end = workdir / "metrics.jsonl", time.monotonic() + 600
    while not path.exists() or path.read_bytes().count(b'"train/loss"') < step:
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes), outputs_of(processes)
        time.sleep(0.01)


@pytest.mark.slow
def test_processes_stop_together_and_one_resumes(start_all, tiny, no_report, tmp_path):
    """Check that a stop signal to one process makes all processes save the same step, that killing one ends the
    others, and that a single process can resume.
    """
    processes = launch_all(start_all, 2, tmp_path)
    wait_for(tmp_path, 4, processes)
    processes[1].send_signal(signal.SIGTERM)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [75, 75], outputs
    stopped = {int(re.search(r"stopped at step (\d+) of 400 after saving", output)[1]) for output in outputs}
    assert stopped == {read_metrics(tmp_path)[-1]["step"]}

    processes = launch_all(start_all, 2, tmp_path)
    wait_for(tmp_path, max(stopped) + 14, processes)
    processes[1].kill()
    begin = time.monotonic()
    output = outputs_of(processes)[0]
    assert time.monotonic() - begin < 60
    assert processes[0].returncode == 1
    # The waiting step fails, or JAX aborts the process after the heartbeat timeout.
    assert re.search("^error: .*a process of this run was lost.* Run the same command on every host", output, re.M)
    assert not re.search(r"^error: .*\.cc:\d+", output, re.M), output  # a line of Gloo's source code
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert saved >= max(stopped)

    changes = {"model.depth": 1, "total_steps": saved + 2, "save_every_steps": 10, "evaluate_every_steps": 400}
    config = tiny("gpt", changes)
    loop.train(config, tmp_path, devices=jax.devices()[:2])
    assert [line["step"] for line in read_metrics(tmp_path) if "train/loss" in line] == [*range(1, saved + 3)]


@pytest.mark.slow
def test_full_disk_of_one_process_ends_all(start_all, tmp_path):
    """Check that a process whose part of a checkpoint cannot be written says so, and that no process hangs."""
    processes = launch_all(start_all, 2, tmp_path)
    wait_for(tmp_path, 4, processes)
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (100, 100))
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert re.search(r"^error: a checkpoint could not be written to .*\(File too large\)", outputs[1], re.M), outputs
    assert re.search("^error: .*a process of this run was lost", outputs[0], re.M), outputs


@pytest.mark.thorough
def test_process_that_stays_alone_says_so(start_all):
    script = "import jax; from functools import partial; from lineage.train import distributed\n"
    script += "jax.distributed.initialize = partial(jax.distributed.initialize, initialization_timeout=1)\n"
    script += "with distributed.joined('{coordinator}', 2, 0): pass"
    (process,) = start_all(1, "-c", script)
    (output,) = outputs_of([process])
    assert process.returncode == 1, output
    assert re.search("^error: .* a process of this run was lost or did not start: .* Run the same", output, re.M)


@pytest.mark.thorough
def test_only_process_0_prints_results(start_all):
    script = "from lineage.runs.process import show\nfrom lineage.train import distributed\n"
    script += "with distributed.joined('{coordinator}', {count}, {number}): show('a text'); print('a line')"
    processes = start_all(2, "-c", script)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [(output.count("a text"), output.count("a line")) for output in outputs] == [(1, 1), (0, 0)]


@pytest.mark.thorough
def test_processes_with_different_commands_end(start_all):
    several = "--coordinator={coordinator}", "--num-processes={count}", "--process={number}"
    processes = start_all(2, "launch.py", "evaluate", "outputs/none", *several, "--config.seed={number}")
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert all("error: the command of process 1 differs from that of process 0" in output for output in outputs)


@pytest.mark.thorough
def test_processes_with_different_code_end(start_all, tmp_path):
    """Check that a process with another version of the code does not train: its parameters would differ silently."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "launch.py").write_text(f"number = {number}")
    script = (
        "from pathlib import Path; from lineage.runs import provenance; from lineage.train import distributed\n"
        f"provenance.PROJECT = Path('{tmp_path}') / '{{number}}'\n"
        "with distributed.joined('{coordinator}', {count}, {number}): pass"
    )
    processes = start_all(2, "-c", script)
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert all("the code of Lineage or the version of a package of process 1 differs" in output for output in outputs)


@pytest.mark.thorough
def test_processes_with_different_numbers_of_devices_end(start_all):
    """Check that each process says so, instead of JAX's error about the shape of an array."""
    script = (
        "import jax; from lineage.train import distributed\n"
        "jax.config.update('jax_num_cpu_devices', {number} + 1)\n"
        "with distributed.joined('{coordinator}', {count}, {number}): pass"
    )
    outputs = outputs_of(start_all(2, "-c", script))
    message = "must have the same number of devices, but process 0 has 1 and process 1 has 2."
    assert any(message in output for output in outputs), outputs


@pytest.mark.thorough
def test_processes_with_different_options_of_jax_end(start_all):
    """Check an option that environment variables set: the initial parameters of the processes would differ silently."""
    script = (
        "import jax; from lineage.train import distributed\n"
        "jax.config.update('jax_default_prng_impl', ('threefry2x32', 'rbg')[{number}])\n"
        "with distributed.joined('{coordinator}', {count}, {number}): pass"
    )
    outputs = outputs_of(start_all(2, "-c", script))
    message = "JAX's option jax_default_prng_impl of process 1 differs from that of process 0."
    assert all(message in output for output in outputs), outputs


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["init.path=model", "experts.paths=('model',)"])
def test_processes_with_different_initial_models_end(option, start_all, tiny, tmp_path):
    """Check copies of a folder on local disks, of which one is old."""
    for number in range(2):
        experiment = Experiment(tiny("vit", {"model.depth": 1, "seed": number}))
        convert.save(tmp_path / f"disk{number}" / "model", experiment.model, experiment.make_state().variables())
    config = tmp_path / "config.py"
    config.write_text(
        "import os, sys\n"
        "from tests.tiny import get_config\n"
        f"os.chdir(f'{tmp_path}/disk{{int(\"--process=1\" in sys.argv)}}')\n"
    )
    changes = f"--config.{option}", "--config.total_steps=1"
    outputs = outputs_of(launch_all(start_all, 2, tmp_path / "run", f"--config={config}:vit", *changes))
    message = r"error: (the model|one of the experts) in model of process 1 differs from that of process 0\."
    assert all(re.search(message, output) for output in outputs), outputs


@pytest.mark.thorough
def test_processes_with_different_data_for_evaluation_end(start_all, tiny, no_report, tmp_path, monkeypatch):
    """Check the source of an evaluator, and the validation data of a trained model, on local disks."""
    for number in range(2):
        (tmp_path / f"disk{number}").mkdir()
        (tmp_path / f"disk{number}" / "dev.txt").write_text("some text\n" * (20 + number))
    monkeypatch.chdir(tmp_path / "disk0")
    data = {"source": f"text:{ROOT}/tests/tiny.py", "source.validation_path": "dev.txt"}
    loop.train(tiny("gpt", data | {"total_steps": 1}), tmp_path / "run", devices=jax.devices()[:1])
    script = f"import os, sys; os.chdir('{tmp_path}/disk{{number}}'); "
    script += "from lineage import launch; launch.main(sys.argv[1:])"
    several = "--coordinator={coordinator}", "--num-processes={count}", "--process={number}"
    evaluator = "--config.evaluators.dev=loss", "--config.evaluators.dev.source=text:dev.txt"
    training = "train", f"--config={ROOT}/tests/tiny.py", f"--workdir={tmp_path}/new", *evaluator
    for command in (training, ("evaluate", tmp_path / "run")):
        outputs = outputs_of(start_all(2, "-c", script, *command, *several))
        message = "error: the data for evaluation of process 1 differs from that of process 0: dev.txt "
        assert all(message in output for output in outputs), outputs


@pytest.mark.slow
def test_processes_wait_for_one_that_compiles_for_longer(start_all, tmp_path):
    """Check a difference above the 30 s for which Gloo waits for another process in the first step."""
    config = tmp_path / "config.py"
    config.write_text(
        "import sys, time\n"
        "from lineage.train import loop\n"
        "from tests.tiny import get_config\n"
        "def compile_step(*args, compile=loop.compile_step):\n"
        "    time.sleep(40 if '--process=1' in sys.argv else 0)\n"
        "    return compile(*args)\n"
        "loop.compile_step = compile_step\n"
    )
    processes = launch_all(start_all, 2, tmp_path / "run", f"--config={config}", "--config.total_steps=1")
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs


@pytest.mark.slow
def test_processes_save_by_the_clock_of_process_0(start_all, tmp_path):
    clock = "--config.checkpoint.every_minutes=1e-9", "--config.save_every_steps=100", "--config.checkpoint.keep=99"
    processes = launch_all(start_all, 2, tmp_path, *clock, "--config.total_steps=8")
    outputs = outputs_of(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len(list((tmp_path / "checkpoints").iterdir())) >= 4  # they agree one step later


@pytest.mark.parametrize(
    "arguments",
    [("localhost:1", 2, None), ("localhost", 2, 0), (None, 2, 1), ("localhost:1", 2, 2), ("auto", 2, 0)],
    ids=str,
)
def test_incomplete_distributed_options_raise(arguments):
    with pytest.raises(ValueError, match="must all be given"), distributed.joined(*arguments):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_port_that_is_in_use_raises(host):
    with socket.create_server((host, 0)) as used:
        address = f"localhost:{used.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"use this port \(Address"), distributed.joined(address, 2, 0):
            pass
    with pytest.raises(ValueError, match="65535"), distributed.joined("localhost:65536", 2, 0):
        pass


def test_single_process_does_not_initialize_jax_distributed(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    with distributed.joined():
        assert not jax.distributed.is_initialized()
    assert distributed.failures() == []
    with pytest.raises(KeyError), distributed.agreed():
        raise KeyError


def test_errors_of_lost_processes_are_recognized():
    for kind in (ValueError, jax.errors.JaxRuntimeError):
        assert distributed.is_lost_process(kind("UNKNOWN: Gloo AllGather failed: Connection closed by peer"))
        assert not distributed.is_lost_process(kind("INTERNAL: a shape is wrong"))
    initializing = "UNAVAILABLE: recvmsg:Connection reset by peer"  # process 0 has ended before the others had devices
    assert distributed.is_lost_process(RuntimeError(f"Unable to initialize backend 'cpu': {initializing}"))
    assert not distributed.is_lost_process(RuntimeError("Unable to initialize backend 'cuda': no connection"))
    assert not distributed.is_lost_process(ValueError("source.path is gloo.txt: the connection is refused."))
    assert not distributed.is_lost_process(None)
