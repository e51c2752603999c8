"""Training-step time of a GPT, including data loading, compared with PyTorch on the same machine.

python -m benchmarks.step_time --config=gpt_shakespeare_char --text=input.txt --peer=transformers
python -m benchmarks.step_time --config=gpt_shakespeare_char --text=input.txt --peer=PATH/OF/nanoGPT

The peer, GPT-2 of `transformers` or of a checkout of nanoGPT, trains a model of the same size on one batch in another
process (see `benchmarks.device.peers`). Each round times some steps of both; the medians over the rounds and the median
of the per-round ratios are printed.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.accelerator import Worker
from benchmarks.device.ours import Run, measured
from lineage.configs import cli
from lineage.runs.process import keep_freed
from lineage.train.experiment import Experiment
from lineage.train.loop import compile_step, device_batches

LIMIT = 600  # seconds in which the peer must be ready, or answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="gpt_shakespeare_char")
    parser.add_argument("--text", required=True, help="training text")
    parser.add_argument("--peer", default="transformers", help="transformers, or the path of a nanoGPT checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds of a round")
    options = parser.parse_args()
    changes = {"source": f"text:{Path(options.text).absolute()}"}
    settings = {"config": options.config, "changes": changes, "on_cpu": True}
    checkout = "" if options.peer == "transformers" else str(Path(options.peer).absolute())
    settings |= {"backend": "eager", "nanogpt": checkout}
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker("peer", "training", settings, dict(os.environ), Path(folder, "peer.txt"))
        try:
            worker.prepare(time.monotonic() + LIMIT)
            sides = (
                ours(options.config, changes),
                lambda seconds: worker.run("training step", seconds, time.monotonic() + LIMIT),
            )
            rounds = [[side(options.seconds) for side in sides] for _ in range(options.rounds + 1)][1:]
        finally:
            worker.stop()
    print(f"ms per step on {os.cpu_count()} cores, median of {options.rounds} rounds of {options.seconds} s:")
    for name, seconds in zip(("lineage", Path(options.peer).name), zip(*rounds)):
        middle, fastest, slowest = (1e3 * statistic(seconds) for statistic in (statistics.median, min, max))
        print(f"{name:18s} {middle:8.1f}  (from {fastest:.1f} to {slowest:.1f})")
    print(f"{'ratio':18s} {statistics.median(mine / theirs for mine, theirs in rounds):8.2f}")


def ours(file: str, changes: dict[str, str]) -> Run:
    """Return a function that runs training steps for some seconds; return the seconds of one with data loading."""
    keep_freed()
    config, _ = cli.load(file)
    cli.override(config, changes)
    experiment = Experiment(config)
    state = jax.jit(experiment.make_state, out_shardings=experiment.state_shardings)()
    function, batches = compile_step(experiment, state), device_batches(experiment, 0)

    def step():
        nonlocal state
        state, metrics = function(state, next(batches))
        return metrics

    return measured(step, jax.block_until_ready)


if __name__ == "__main__":
    main()
