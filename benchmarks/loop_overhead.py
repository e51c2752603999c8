"""What the training loop costs beside the compiled step and the data fetch, on a config.

python -m benchmarks.loop_overhead --config=configs/vit_digits.py

Three times, in turns: the compiled step alone, on one batch; fetching batches; and the loop as it is (metrics looked
at, written and shown), without evaluations and checkpoints. The overhead is what the loop takes beyond step and fetch.
"""

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import jax

import configs
from launch import keep_freed_memory
from train import costs
from train.experiment import Experiment
from train.loop import Loop, device_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/vit_digits.py")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    options = parser.parse_args()
    keep_freed_memory()
    config, _ = configs.load(options.config)
    many = (options.rounds + 2) * options.steps
    changes = {"total_steps": many + 1, "evaluate_every_steps": many + 1, "save_every_steps": many + 1}
    configs.override(config, changes)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        experiment = Experiment(config, Path(folder))
        loop = Loop(experiment, costs.Clock(experiment), stack)
        batches = device_batches(experiment, 0)
        batch = next(batches)
        done = 0

        def timed(function):
            start = time.perf_counter()
            for _ in range(options.steps):
                function()
            jax.block_until_ready(loop.state)
            return (time.perf_counter() - start) / options.steps * 1e3

        def step():
            loop.state, metrics = loop.step_function(loop.state, batch)
            jax.block_until_ready(metrics)

        def run():
            nonlocal done
            done += 1
            loop.run(done)

        timed(step), timed(run)
        rounds = [
            (timed(step), timed(lambda: jax.block_until_ready(next(batches))), timed(run))
            for _ in range(options.rounds)
        ]
    names = ("compiled step", "data fetch", "loop")
    for name, times in zip(names, zip(*rounds)):
        print(f"{name:14s} {statistics.median(times):8.2f} ms")
    overhead = statistics.median((whole - step - fetch) / whole for step, fetch, whole in rounds)
    print(f"{'overhead':14s} {overhead:8.1%} of the loop's step")


if __name__ == "__main__":
    main()
