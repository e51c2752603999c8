"""Batches as functions of (seed, step), so that any step can be reached at the same cost."""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import resource_tracker
from typing import Annotated, Any, Literal

import numpy as np

from lineage.configs.registry import Count, Natural, Range, check_ranges
from lineage.data import shuffle

# Signals that the run handles: its worker processes ignore them.
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
# Why a process cannot be started: there are too many open files or processes, or too little memory.
LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
NO_SHARED_MEMORY = (errno.ENOSPC, errno.ENOENT, errno.EROFS, errno.EACCES)  # it is full, missing or not writable
ENDED = "Worker process was terminated"  # begins Grain's message on a process that has ended
GRACE = 5.0  # seconds that worker processes have to end by themselves
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Loader:
    """Options of batches.

    Attributes:
        batch_size: global batch size of a training step.
        evaluation_batch_size: global batch size of evaluation; 0: batch_size.
        order: "": shuffle the training examples; "stream": sequence b of each batch continues where sequence b of the
            previous batch ended, for windows of text. With a memory, the metrics then depend on evaluation_batch_size:
            the memory is empty at the beginning of each of its sequences.
        buckets: lengths in increasing order. A training batch then has sequences of similar length, padded to the
            shortest bucket that they fit in, or to the full length.
        repeats: number of copies of each training example in a batch, augmented differently (arXiv 1901.09335).
        workers: number of processes that read ahead.
        threads: number of threads in each process that read ahead. Without workers and threads, nothing is read ahead.
    """

    batch_size: Count = 128
    evaluation_batch_size: Natural = 0
    order: Literal["", "stream"] = ""
    buckets: Annotated[tuple[int, ...], Range(1)] = ()
    repeats: Count = 1
    workers: Natural = 0
    threads: Natural = 0

    def __post_init__(self):
        check_ranges("loader", self)
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"loader.buckets is {self.buckets}: it must be lengths in increasing order.")


class ExampleSource:
    """Base class of sources of examples with random access to many examples at a time."""

    cut: int = 0  # number of examples whose texts are truncated
    left_out: int = 0  # number of examples that are not in the source because they are too long

    def __len__(self) -> int:
        """Return the number of examples."""
        raise NotImplementedError

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        """Return the examples of `indices` int64 [N]: an array of each feature, or a list if shapes differ."""
        raise NotImplementedError

    def check(self, index: int) -> None:
        """Raise ValueError if an example is damaged, as far as this can be seen without reading all of it."""

    def notes(self) -> Iterator[str]:
        """Yield notes on probable mistakes, which may be intended."""
        yield from ()

    def shuffled(self, positions: np.ndarray, seed: int) -> dict[str, Any]:
        """Return the examples at positions int64 [N] of an endless stream in which each epoch has a new order."""
        return self.take(shuffle.permute(positions, len(self), seed))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one example."""
        return {name: value[0] for name, value in self.take(np.array([index])).items()}


def evenly_spaced(count: int, limit: int) -> np.ndarray:
    """Return at most `limit` indices below `count`, evenly spaced, with the first and the last one, int64 [N]."""
    return np.unique(np.linspace(0, count - 1, limit, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class _Batches:
    source: ExampleSource
    loader: Loader
    transform: Callable[[dict[str, Any], np.ndarray], Batch] | None = None
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        if self.batch_size % self.process_count:
            sizes = f"The batch size is {self.batch_size}, the number of processes {self.process_count}"
            raise ValueError(f"{sizes}: the former must be a multiple of the latter.")
        if not len(self.source):
            raise ValueError("The data set is empty: at least one example is needed.")

    @property
    def batch_size(self) -> int:
        """Number of examples in a global batch."""
        return self.loader.batch_size

    def _rows(self) -> np.ndarray:
        """Return the contiguous part of the indices of a global batch that this process reads."""
        rows = self.batch_size // self.process_count
        return self.process_index * rows + np.arange(rows)

    def _positions(self, number: int) -> np.ndarray:
        """Return the positions in the stream of examples that this process reads for global batch `number`."""
        return number * self.batch_size + self._rows()

    def _until(self, stop: int, number: int) -> Batch:
        """Return batch `number`; from `stop` on, which prefetching may reach, an empty one that is never used."""
        return self[number] if number < stop else {}

    def _ahead(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield batches start..stop-1; Grain's worker processes and threads, if any, read ahead."""
        workers, threads = self.loader.workers, self.loader.threads
        if not workers and not threads:
            for number in range(start, stop):  # `map` would end if user code raises StopIteration
                yield self[number]
            return
        import grain  # imported here because it imports JAX if that is installed
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain's workers read its flags, which only absl's main parses
            flags.FLAGS.mark_as_parsed()
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        # The range has no end, at which a reference cycle in Grain would keep shared memory alive.
        numbers = grain.MapDataset.range(start, sys.maxsize)
        batches = numbers.map(partial(self._until, stop)).to_iter_dataset(options)
        if workers:
            options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
            batches = batches.mp_prefetch(options, worker_init_fn=live_as_long_as_parent)
        before, iterator = {*multiprocessing.active_children()}, iter(batches)
        try:
            yield shielded(partial(next, iterator))
            for _ in range(start + 1, stop):
                yield next(iterator)
        except RuntimeError as error:
            if not str(error).startswith(ENDED):
                raise
            raise ChildProcessError(f"a worker process of the loader has ended: {error}") from error
        except OSError as error:
            in_memory = str(error.filename).startswith("/psm_")  # Python's name of a block of shared memory
            if not workers or (error.filename is not None and not in_memory):  # such as an error of the user's code
                raise
            if error.errno in LIMITS:
                action = "read the batches of" if in_memory else "start"
                why = f"the loader cannot {action} a worker process: {error.strerror}"
                raise OSError(error.errno, f"{why}; set loader.workers=0, or raise the limit") from error
            if error.errno in NO_SHARED_MEMORY:
                why = "is full: enlarge it" if error.errno == errno.ENOSPC else f"is needed: {error.strerror}; mount it"
                why = f"shared memory {why}, or use loader.threads instead of loader.workers"
                raise OSError(error.errno, why, "/dev/shm") from error
            raise
        finally:
            with _killing_late(before), contextlib.suppress(AssertionError):  # raised for a worker that was not started
                iterator.close()


@contextlib.contextmanager
def _killing_late(others):
    """Kill all worker processes but `others` if the block, in which Grain waits for them, takes longer than `GRACE`.

    Otherwise a worker that hangs, for example in reading from a server that is down, would keep the run from ending.
    """

    def kill():
        for worker in {*multiprocessing.active_children()} - others:
            worker.kill()

    late = threading.Timer(GRACE, kill)
    late.daemon = True
    with contextlib.suppress(RuntimeError):  # Python is shutting down
        late.start()
    try:
        yield
    finally:
        late.cancel()


def shielded(start: Callable[[], Any]) -> Any:
    """Return the result of a function that starts worker processes, which begin with the signals of the run blocked.

    A cluster or a terminal signals all processes of a run, and workers take seconds to import modules until they can
    ignore signals. They inherit the blocked signals from the thread that starts them.
    """
    result = Future()

    def call():
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
            resource_tracker.ensure_running()  # the first call unblocks SIGINT and SIGTERM, which the tracker ignores
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
            result.set_result(start())
        except BaseException as error:  # raised by `result`
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result.result()


def live_as_long_as_parent(*_: int) -> None:
    """Ignore signals in a worker process, because the run handles them, and terminate it when its parent dies."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    run = multiprocessing.parent_process()
    threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class TrainBatches(_Batches):
    """Endless training batches; `batches[n]` is this process's part of the batch of step n (0-based).

    The examples come in a new order in each epoch; a batch may contain the end of one epoch and the beginning of the
    next. The global batch of a step is the same for any number of processes, workers and threads. With order
    "stream", the sequences of the first batch are evenly spread over the source.

    Each of the `buckets` is a separate stream. Its share of the batches in each round of steps is its share of the
    examples; the order of the batches in a round is random. With `repeats`, each copy of an example has its own key for
    the transform, and a pass over the source takes `repeats` epochs.
    """

    seed: int

    @property
    def examples_per_epoch(self) -> int:
        """Number of examples in one pass over the source or, with buckets, in one round of steps."""
        return self.batch_size * int(self._rounds[-1]) if self.loader.buckets else len(self.source)

    @property
    def lengths(self) -> dict[int | None, float]:
        """Fraction of the batches in each bucket, by its length; None is the full length."""
        shares = np.diff(self._rounds, prepend=0) / self._rounds[-1] if self.loader.buckets else [1.0]
        return {length: float(share) for length, share in zip((*self.loader.buckets, None), shares) if share}

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step {step} is negative: steps count from 0")
        positions = self._positions(step)
        if self.loader.order == "stream":
            size = len(self.source)
            batch = self.source.take((self._rows() * size // self.batch_size + step) % size)
        elif self.loader.buckets:
            batch = self._of_one_length(step)
        else:
            different = -(-self.batch_size // self.loader.repeats)
            once = step * different + positions % self.batch_size % different
            batch = self.source.shuffled(once, self.seed)
        batch.setdefault("mask", np.ones(len(positions), bool))
        return self.transform(batch, shuffle.keys(positions, ~self.seed)) if self.transform else batch

    def _of_one_length(self, step):
        in_round = int(self._rounds[-1])
        number = shuffle.permute(np.array([step]), in_round, self.seed)[0]
        bucket = int(np.searchsorted(self._rounds, number, side="right"))
        first = self._rounds[bucket - 1] if bucket else 0
        nth = step // in_round * (self._rounds[bucket] - first) + number - first
        members, length = self._members[bucket], (*self.loader.buckets, None)[bucket]
        chosen = shuffle.permute(self._positions(nth), len(members), self.seed + bucket + 1)
        batch = self.source.take(members[chosen])
        return {name: value[:, :length] if value.ndim > 1 else value for name, value in batch.items()}

    @cached_property
    def _members(self) -> list[np.ndarray]:
        """Indices of the examples in each bucket."""
        bucket = np.searchsorted(self.loader.buckets, self.source.lengths)
        return [np.flatnonzero(bucket == number) for number in range(len(self.loader.buckets) + 1)]

    @cached_property
    def _rounds(self) -> np.ndarray:
        """Cumulative number of batches of the buckets in a round."""
        counts = np.array([len(members) for members in self._members])
        return np.cumsum(np.maximum(np.rint(counts / self.batch_size).astype(int), counts > 0))

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of steps start, start + 1, ... endlessly."""
        return self._ahead(start, sys.maxsize)


@dataclass(frozen=True, kw_only=True)
class EvaluationBatches(_Batches):
    """One pass over the source in its own order; the last batch is padded with examples whose `mask` is False.

    The transform gets keys that count the examples from position `first`.
    """

    first: int = 0

    @property
    def batch_size(self) -> int:
        return self.loader.evaluation_batch_size or self.loader.batch_size

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        positions = self._rows() * len(self) + number if self.loader.order == "stream" else self._positions(number)
        real = positions < len(self.source)
        batch = self.source.take(np.minimum(positions, len(self.source) - 1))
        mask = batch.get("mask", real)
        batch["mask"] = mask & real.reshape(-1, *[1] * (mask.ndim - 1))
        return self.transform(batch, shuffle.keys(self.first + positions, 0)) if self.transform else batch

    def __iter__(self) -> Iterator[Batch]:
        return self._ahead(0, len(self))
