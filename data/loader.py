"""Batches as functions of (seed, step): any step costs the same to reach, however the run got there."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from lineage.data import shuffle

Batch = dict[str, np.ndarray]


class Source(Protocol):
    """Random access to examples, many at a time."""

    def __len__(self) -> int:
        """The number of examples."""

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        """The examples of `indices` int64 [N], each feature stacked on a leading axis (or a list, if shapes differ)."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One example."""
        return {name: value[0] for name, value in self.take(np.array([index])).items()}


@dataclass(frozen=True, kw_only=True)
class _Batches:
    source: Source
    batch_size: int
    order: str = ""
    transform: Callable[[dict[str, Any], np.ndarray], Batch] | None = None
    process_index: int = 0
    process_count: int = 1
    workers: int = 0
    threads: int = 0

    def __post_init__(self):
        if self.batch_size < 1 or self.batch_size % self.process_count:
            raise ValueError(
                f"batch size {self.batch_size} does not divide over {self.process_count} processes: "
                "it must be a positive multiple of their number"
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process_index={self.process_index} must be in 0..{self.process_count - 1}")
        if min(self.workers, self.threads) < 0:
            raise ValueError(f"workers={self.workers} and threads={self.threads} must not be negative")
        if self.order not in ("", "stream"):
            raise ValueError(f"order={self.order!r} must be 'stream' or ''")
        if not len(self.source):
            raise ValueError("the data set is empty: at least one example is needed")

    def _rows(self) -> np.ndarray:
        """This process's rows of a global batch: a contiguous part, so that parts concatenate."""
        rows = self.batch_size // self.process_count
        return self.process_index * rows + np.arange(rows)

    def _positions(self, number: int) -> np.ndarray:
        """Positions of this process's rows of global batch `number`, batch after batch."""
        return number * self.batch_size + self._rows()

    def _ahead(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches start..stop-1 in order, made ahead by Grain's worker processes and threads if asked for."""
        if not self.workers and not self.threads:
            yield from map(self.__getitem__, range(start, stop))
            return
        import grain  # Here, because it imports JAX where that is installed.
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain's workers read its flags, which only an absl main has parsed.
            flags.FLAGS.mark_as_parsed()
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=2 * self.threads)
        batches = grain.MapDataset.range(start, stop).map(self.__getitem__).to_iter_dataset(options)
        if self.workers:
            options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
            batches = batches.mp_prefetch(options, worker_init_fn=_depend)
        iterator = iter(batches)
        try:
            yield from iterator
        finally:
            iterator.close()


def _depend(index, count):
    """Makes a worker end when its run does, and not before: a signal to all processes of a run is the run's to answer,
    which still needs batches; of a run that was killed nobody else would end the workers."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    run = multiprocessing.parent_process()
    threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class TrainBatches(_Batches):
    """Endless training batches; `batches[n]` is this process's part of the batch of step n (0-based).

    The stream is the source in a new order in each epoch, epoch after epoch without a gap, so a batch may straddle two.
    The global batch of a step is the same for any number of processes, workers and threads. In the order "stream" each
    row goes through the source in its own order, over and over, the rows starting evenly spread: row b of a batch goes
    on where row b of the batch before ended.

    With `buckets`, rising lengths, a batch has examples of about one length, and its sequences are cut to the shortest
    bucket that they fit in: each bucket is a stream of its own, and in every round of steps, in a new order, it has as
    many batches as its part of the source is.

    With `repeats`, a batch has as many copies of each of its examples, which are not neighbours in it, each with a key
    of its own for the transform: repeated augmentation (arXiv 1901.09335). A pass takes so many epochs then.
    """

    seed: int
    repeats: int = 1
    buckets: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if list(self.buckets) != sorted(set(self.buckets)) or any(bound < 1 for bound in self.buckets):
            raise ValueError(f"buckets={self.buckets} must be rising lengths")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1")

    @property
    def examples_per_epoch(self) -> int:
        """The number of examples in one pass over the source; with buckets, in one round."""
        return self.batch_size * int(self._rounds[-1]) if self.buckets else len(self.source)

    @property
    def lengths(self) -> dict[int | None, float]:
        """The part of the batches that each bucket has, by its length; None is whole sequences."""
        shares = np.diff(self._rounds, prepend=0) / self._rounds[-1] if self.buckets else [1.0]
        return {length: float(share) for length, share in zip((*self.buckets, None), shares) if share}

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step {step} is negative: steps count from 0")
        positions = self._positions(step)
        if self.order == "stream":
            size = len(self.source)
            batch = self.source.take((self._rows() * size // self.batch_size + step) % size)
        else:
            different = -(-self.batch_size // self.repeats)
            once = step * different + positions % self.batch_size % different
            batch = self._of_one_length(step) if self.buckets else self._take(once, None, self.seed)
        batch.setdefault("mask", np.ones(len(positions), bool))
        return self.transform(batch, shuffle.keys(positions, ~self.seed)) if self.transform else batch

    def _take(self, positions, members, seed):
        chosen = shuffle.permute(positions, len(self.source) if members is None else len(members), seed)
        return self.source.take(chosen if members is None else members[chosen])

    def _of_one_length(self, step):
        in_round = int(self._rounds[-1])
        number = shuffle.permute(np.array([step]), in_round, self.seed)[0]
        bucket = int(np.searchsorted(self._rounds, number, side="right"))
        first = self._rounds[bucket - 1] if bucket else 0
        nth = step // in_round * (self._rounds[bucket] - first) + number - first
        batch = self._take(self._positions(nth), self._members[bucket], self.seed + bucket + 1)
        return {
            name: value[:, : (*self.buckets, None)[bucket]] if value.ndim > 1 else value
            for name, value in batch.items()
        }

    @cached_property
    def _members(self) -> list[np.ndarray]:
        """The examples of each bucket that has any."""
        bucket = np.searchsorted(self.buckets, self.source.lengths)
        return [np.flatnonzero(bucket == number) for number in range(len(self.buckets) + 1)]

    @cached_property
    def _rounds(self) -> np.ndarray:
        """How many batches of a round are of the buckets up to each."""
        counts = np.array([len(members) for members in self._members])
        return np.cumsum(np.maximum(np.rint(counts / self.batch_size).astype(int), counts > 0))

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """The batches of steps start, start + 1, ... without end."""
        return self._ahead(start, sys.maxsize)


@dataclass(frozen=True, kw_only=True)
class EvaluationBatches(_Batches):
    """One pass over the source in its own order, every example once; the last batch is padded with `mask` False.

    Every process yields the same number of batches. It can be iterated again and again. In the order "stream" each row
    has a part of the source for itself: row b of a batch goes on where row b of the batch before ended.
    """

    @property
    def num_examples(self) -> int:
        """The number of examples, padding not counted."""
        return len(self.source)

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        positions = self._rows() * len(self) + number if self.order == "stream" else self._positions(number)
        real = positions < len(self.source)
        batch = self.source.take(np.minimum(positions, len(self.source) - 1))
        mask = batch.get("mask", real)
        batch["mask"] = mask & real.reshape(-1, *[1] * (mask.ndim - 1))
        return self.transform(batch, shuffle.keys(positions, 0)) if self.transform else batch

    def __iter__(self) -> Iterator[Batch]:
        return self._ahead(0, len(self))
