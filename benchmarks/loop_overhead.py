"""Overhead of the training loop over the compiled step and the data loading; and the cost of checkpoints.

python -m benchmarks.loop_overhead --config=vit_digits
python -m benchmarks.loop_overhead --config=gpt_shakespeare_char --save-every=50

Each round times three parts: the compiled step on one batch, data loading, and the full loop (with metrics, without
evaluations and checkpoints). The overhead is the fraction of the loop's time beyond step and loading. With
`--save-every`, each round times the loop without and with checkpoints, over ten saves, until the last is written.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import jax

from lineage.configs import cli
from lineage.runs.process import keep_freed
from lineage.train.experiment import Experiment
from lineage.train.loop import TrainingLoop, device_batches
from lineage.train.profiling.throughput import Throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/small/vit_digits.py")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: the loop alone)")
    parser.add_argument("--source", help="data source, instead of that of the config")
    options = parser.parse_args()
    keep_freed()
    config, _ = cli.load(options.config)
    options.steps = 10 * options.save_every or options.steps
    many = 2 * (options.rounds + 2) * options.steps
    changes = {"total_steps": many + 1, "evaluate_every_steps": many + 1, "save_every_steps": many + 1}
    cli.override(config, changes | ({"source": options.source} if options.source else {}))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        experiment = Experiment(config, Path(folder))
        loop = TrainingLoop(experiment, Throughput(experiment), stack)
        batches = device_batches(experiment, 0)
        batch = next(batches)
        done = 0

        def timed(function, save_every=many):
            loop.save_every, start = save_every, time.perf_counter()
            for _ in range(options.steps):
                function()
            jax.block_until_ready(loop.state)
            loop.checkpoints.wait()
            return (time.perf_counter() - start) / options.steps * 1e3

        def step():
            loop.state, metrics = loop.step_function(loop.state, batch)
            jax.block_until_ready(metrics)

        def fetch():
            jax.block_until_ready(next(batches))

        def run():
            nonlocal done
            done += 1
            loop.run(done)

        parts = {"loop": (run,), "with saves": (run, options.save_every)}
        if not options.save_every:
            parts = {"compiled step": (step,), "data fetch": (fetch,), "loop": (run,)}
        for part in parts.values():
            timed(*part)
        rounds = [[timed(*part) for part in parts.values()] for _ in range(options.rounds)]
    for name, times in zip(parts, zip(*rounds)):
        print(f"{name:14s} {statistics.median(times):8.2f} ms")
    overhead = statistics.median((last - sum(others)) / last for *others, last in rounds)
    print(f"{'overhead':14s} {overhead:8.1%} of the loop time")


if __name__ == "__main__":
    main()
