import errno
import gc
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lineage.data import loader, shuffle
from lineage.data.content import Arrays
from tests.data.conftest import evaluation_batches, train_batches


def source(n):
    return Arrays({"number": np.arange(n)})


def add_noise(batch, keys):
    return {**batch, "noise": shuffle.mix(keys)}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype


def test_epochs_are_different_permutations():
    batches = train_batches(source=source(10), batch_size=4, seed=0)
    stream = np.concatenate([batches[step]["number"] for step in range(10)])
    epochs = stream.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batches.examples_per_epoch == 10
    assert batches[3]["mask"].all()


def test_batch_larger_than_the_source():
    numbers = train_batches(source=source(3), batch_size=8, seed=0)[0]["number"]
    assert sorted(numbers[:3]) == sorted(numbers[3:6]) == [0, 1, 2]


@pytest.mark.parametrize("size", [12, 10])
def test_repeated_examples_are_in_different_chunks_and_transformed_independently(size):
    batches = train_batches(source=source(20), batch_size=size, seed=3, repeats=3, transform=add_noise)
    once = -(-size // 3)
    for step in range(3):
        batch = batches[step]
        numbers = batch["number"]
        np.testing.assert_array_equal(numbers, np.tile(numbers[:once], 3)[:size])
        assert len(set(numbers.tolist())) == once
        assert len(set(batch["noise"].tolist())) == size
    assert sorted(np.concatenate([batches[step]["number"][:once] for step in range(5)])) == sorted(range(20))
    assert batches.examples_per_epoch == 20


def test_iterate_matches_indexing_from_any_step():
    batches = train_batches(source=source(50), batch_size=7, seed=1, transform=add_noise)
    for start in (0, 3, 10**9):
        for offset, batch in enumerate(itertools.islice(batches.iterate(start), 4)):
            same(batch, batches[start + offset])


def test_noise_differs_between_epochs_and_seeds():
    batches = train_batches(source=source(5), batch_size=5, seed=1, transform=add_noise)
    other = train_batches(source=source(5), batch_size=5, seed=2, transform=add_noise)
    noise = np.concatenate([batches[0]["noise"], batches[1]["noise"], other[0]["noise"]])
    assert len(set(noise.tolist())) == 15


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_processes_share_the_global_batch(processes):
    whole = train_batches(source=source(20), batch_size=12, seed=4, transform=add_noise)
    parts = [
        train_batches(
            source=source(20), batch_size=12, seed=4, transform=add_noise, process_index=i, process_count=processes
        )
        for i in range(processes)
    ]
    for step in (0, 1, 17):
        joined = {name: np.concatenate([part[step][name] for part in parts]) for name in whole[step]}
        same(joined, whole[step])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["threads", "workers"])
def test_prefetched_batches_are_identical(kind):
    plain = train_batches(source=source(100), batch_size=16, seed=4, transform=add_noise)
    ahead = train_batches(source=source(100), batch_size=16, seed=4, transform=add_noise, **{kind: 2})
    iterator = ahead.iterate(5)
    for step in range(5, 12):
        same(next(iterator), plain[step])
    iterator.close()


@pytest.mark.parametrize("kind", ["threads", pytest.param("workers", marks=pytest.mark.slow)])
def test_prefetched_evaluation_batches_are_identical(kind):
    plain = evaluation_batches(source=source(100), batch_size=16)
    ahead = evaluation_batches(source=source(100), batch_size=16, **{kind: 2})
    for expected, batch in itertools.zip_longest(plain, ahead):
        same(batch, expected)


@pytest.mark.thorough
def test_evaluation_frees_shared_memory_at_its_end():
    """Check the last batch too: at the end of a run, Python reports shared memory that is still in use."""
    gc.disable()  # so that no cycle of references is freed
    try:
        batches = evaluation_batches(source=source(48), batch_size=16, workers=1)
        paths = [Path("/dev/shm", batch["number"].shm.name) for batch in batches]
        assert len(paths) == 3
        end = time.monotonic() + 30  # a thread of Grain frees it
        while any(path.exists() for path in paths):
            assert time.monotonic() < end, "shared memory is still in use"
            time.sleep(0.01)
    finally:
        gc.enable()


def test_workers_ignore_signals_and_end_with_their_run():
    """Check that workers ignore cluster signals and terminate when their parent is killed."""
    script = """
import multiprocessing, os, signal, sys
from tests.data.conftest import train_batches
from tests.data.test_loader import source
if __name__ == "__main__":
    batches = train_batches(source=source(100), batch_size=16, seed=4, workers=1).iterate()
    next(batches)
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(worker.pid, number)
    for _ in range(20):
        next(batches)
    print(worker.pid, flush=True)
    sys.stdin.read()
"""
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2]) as run:
        worker = int(run.stdout.readline())
        run.kill()
    end = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < end, "the worker is still there"
        time.sleep(0.1)


@pytest.mark.thorough
def test_workers_ignore_signals_while_they_start():
    """Check that signals to all processes of a run do not end workers that are still importing modules."""
    batches = train_batches(source=source(100), batch_size=16, seed=4, workers=2).iterate()
    signaled = set()

    def interrupt():
        while len(signaled) < 2:
            for worker in {*multiprocessing.active_children()} - signaled:
                os.kill(worker.pid, signal.SIGINT)
                os.kill(worker.pid, signal.SIGTERM)
                signaled.add(worker)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert len(list(itertools.islice(batches, 5))) == 5
    thread.join()


def test_first_worker_begins_with_blocked_signals():
    """Check a process without a resource tracker: Python starts it before the worker, and unblocks two signals."""
    script = """
import multiprocessing
from lineage.data.loader import HANDLED, shielded
worker = multiprocessing.get_context("spawn").Process(target=print)
shielded(worker.start)
blocked = int(open(f"/proc/{worker.pid}/status").read().partition("SigBlk:")[2].split()[0], 16)
worker.join()
assert all(blocked >> number - 1 & 1 for number in HANDLED), hex(blocked)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class Fault:
    """Transform whose fourth call, when the run has read the first batch, sends a signal to its process.

    A signal at any other moment may leave one of Grain's locks held, and the run would wait for it forever.
    """

    def __init__(self, number):
        self.number, self.calls = number, 0

    def __call__(self, batch, keys):
        self.calls += 1
        if self.calls == 4:
            os.kill(os.getpid(), self.number)
        return batch


@pytest.mark.thorough
def test_worker_that_hangs_does_not_keep_a_run_from_ending(monkeypatch):
    monkeypatch.setattr(loader, "GRACE", 0.5)
    before = {*multiprocessing.active_children()}
    batches = train_batches(source=source(100), batch_size=16, seed=4, workers=1, transform=Fault(signal.SIGSTOP))
    iterator = batches.iterate()
    next(iterator)
    (worker,) = {*multiprocessing.active_children()} - before
    time.sleep(1)  # until Grain waits for the next batch
    iterator.close()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.thorough
def test_killed_worker_raises():
    batches = train_batches(source=source(100), batch_size=16, seed=4, workers=1, transform=Fault(signal.SIGKILL))
    with pytest.raises(ChildProcessError, match=r"a worker process of the loader has ended: .* exit code -9"):
        list(itertools.islice(batches.iterate(), 20))


@pytest.mark.thorough
def test_worker_that_cannot_be_started_is_reported(monkeypatch, recwarn):
    start, started = multiprocessing.context.SpawnProcess._Popen, []

    def start_one(worker):
        if started:
            raise OSError(errno.EMFILE, "Too many open files")
        return started.append(worker) or start(worker)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "_Popen", staticmethod(start_one))
    batches = train_batches(source=source(4), batch_size=2, seed=0, workers=2).iterate()
    with pytest.raises(OSError, match="the loader cannot start a worker process: Too many open files"):
        list(itertools.islice(batches, 8))
    assert not multiprocessing.active_children()
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, pytest.PytestUnraisableExceptionWarning)]


def fill(batch, keys):
    raise OSError(errno.ENOSPC, "No space left on device")  # as in a container without --shm-size


@pytest.mark.thorough
def test_full_shared_memory_is_named():
    batches = train_batches(source=source(4), batch_size=2, seed=0, transform=fill, workers=1)
    with pytest.raises(OSError, match=r"shared memory is full: .* loader\.threads .*'/dev/shm'"):
        next(batches.iterate())


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EROFS, errno.EACCES])
def test_shared_memory_that_is_missing_or_not_writable_is_named(number, monkeypatch):
    """Check the error that the first semaphore raises, which has no file name, on a machine without /dev/shm."""

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", fail)
    with pytest.raises(OSError, match=r"shared memory is needed: .* loader\.threads .*'/dev/shm'") as raised:
        next(train_batches(source=source(4), batch_size=2, seed=0, workers=1).iterate())
    assert raised.value.errno == number


def exceed_open_files(batch, keys):
    raise OSError(errno.EMFILE, "Too many open files", "/psm_0123abcd")  # of a block of shared memory


@pytest.mark.thorough
def test_shared_memory_that_cannot_be_opened_is_reported():
    batches = train_batches(source=source(4), batch_size=2, seed=0, transform=exceed_open_files, workers=1)
    expected = "the loader cannot read the batches of a worker process: Too many open files; set loader.workers=0"
    with pytest.raises(OSError, match=expected):
        next(batches.iterate())


ERRORS = (
    ValueError("the picture is torn"),
    RuntimeError("the decoder has failed"),
    OSError(errno.ENOSPC, "No space left on device", "/data/frames"),
)


class Failure:
    def __init__(self, number):
        self.number = number

    def __call__(self, batch, keys):
        raise ERRORS[self.number]


@pytest.mark.parametrize("kind", [{}, {"threads": 1}, pytest.param({"workers": 1}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_worker_exception_reaches_the_caller(kind, number):
    batches = train_batches(source=source(4), batch_size=2, seed=0, transform=Failure(number), **kind)
    with pytest.raises(type(ERRORS[number]), match=re.escape(str(ERRORS[number]))):
        next(batches.iterate())


def end(batch, keys):
    raise StopIteration


@pytest.mark.parametrize("kind", [{}, {"threads": 1}])
def test_user_code_cannot_end_an_evaluation(kind):
    """Check that StopIteration, raised by `next` in a transform, does not leave out the rest of the examples."""
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(evaluation_batches(source=source(40), batch_size=8, transform=end, **kind))


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("n", [1, 50, 64])
def test_evaluation_contains_each_example_once(size, n):
    batches = evaluation_batches(source=source(n), batch_size=size)
    assert len(batches) == len(list(batches)) == -(-n // size)
    assert len(batches.source) == n
    for _ in range(2):
        assert [int(i) for batch in batches for i in batch["number"][batch["mask"]]] == list(range(n))
    assert all(len(batch["number"]) == size for batch in batches)


@pytest.mark.parametrize("processes", [2, 4])
def test_evaluation_is_divided_among_processes(processes):
    parts = [
        evaluation_batches(source=source(9), batch_size=8, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    assert {len(list(part)) for part in parts} == {2}
    seen = [int(i) for part in parts for batch in part for i in batch["number"][batch["mask"]]]
    assert sorted(seen) == list(range(9))


def test_evaluation_padding_extends_token_masks():
    tokens = Arrays({"tokens": np.ones((3, 5), np.int32), "mask": np.tile([True, True, True, False, False], (3, 1))})
    first, second = evaluation_batches(source=tokens, batch_size=2)
    assert first["mask"].sum() == 6
    assert second["mask"].tolist() == [[True, True, True, False, False], [False] * 5]


def test_indices_out_of_range_raise():
    evaluation = evaluation_batches(source=source(3), batch_size=2)
    with pytest.raises(IndexError):
        evaluation[2]
    with pytest.raises(IndexError, match="step -1"):
        train_batches(source=source(3), batch_size=2, seed=0)[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10, "process_count": 4}, "batch size is 10, the number of processes 4: the former must be a"),
        ({"batch_size": 0}, "loader.batch_size is 0: it must be 1 or more"),
        ({"batch_size": 4, "workers": -1}, "loader.workers is -1: it must be 0 or more"),
        ({"batch_size": 4, "repeats": 0}, "loader.repeats is 0: it must be 1 or more"),
        ({"batch_size": 4, "buckets": (0, 3)}, r"loader.buckets is \(0, 3\): it must be 1 or more"),
        ({"batch_size": 4, "buckets": (3, 3)}, r"loader.buckets is \(3, 3\): it must be lengths in increasing order"),
        ({"batch_size": 4, "source": source(0)}, "The data set is empty"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        evaluation_batches(**{"source": source(5), **options})


@pytest.mark.parametrize(("n", "size"), [(12, 4), (11, 4), (3, 8)])
def test_stream_rows_are_contiguous(n, size):
    batches = train_batches(source=source(n), batch_size=size, seed=0, order="stream")
    rows = np.stack([batches[step]["number"] for step in range(3 * n)])
    np.testing.assert_array_equal(rows[1:], (rows[:-1] + 1) % n)
    assert np.bincount(rows.ravel()).tolist() == [3 * size] * n
    # The rows start at evenly spaced positions, so that this number of batches covers the source.
    assert set(rows[: -(-n // size)].ravel()) == set(range(n))
    for start in (0, 7, 10**9):
        for offset, batch in enumerate(itertools.islice(batches.iterate(start), 2)):
            same(batch, batches[start + offset])


@pytest.mark.parametrize(("n", "size"), [(12, 4), (11, 4), (9, 8), (3, 8)])
def test_evaluation_stream_rows_are_contiguous_and_complete(n, size):
    batches = evaluation_batches(source=source(n), batch_size=size, order="stream")
    assert len(list(batches)) == len(batches) == -(-n // size)
    rows, real = (np.stack([batch[name] for batch in batches], axis=1) for name in ("number", "mask"))
    assert rows[real].tolist() == list(range(n))
    both = real[:, :-1] & real[:, 1:]
    np.testing.assert_array_equal(rows[:, 1:][both], rows[:, :-1][both] + 1)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_a_stream(processes):
    for make in (lambda **how: train_batches(seed=0, **how), evaluation_batches):
        options = {"source": source(21), "batch_size": 8, "order": "stream"}
        whole = make(**options)
        parts = [make(**options, process_index=i, process_count=processes) for i in range(processes)]
        for step in range(3):
            joined = {name: np.concatenate([part[step][name] for part in parts]) for name in whole[step]}
            same(joined, whole[step])
