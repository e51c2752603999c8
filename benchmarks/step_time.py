"""Training-step time of a GPT compared with PyTorch on the same machine.

python -m benchmarks.step_time --config=gpt_shakespeare_char --text=input.txt --peer=transformers
python -m benchmarks.step_time --config=gpt_shakespeare_char --text=input.txt --peer=PATH/OF/nanoGPT

The peer trains a model of the same size in another process: `transformers`' GPT-2, or the model and the optimizer of a
checkout of nanoGPT. Each round times some steps of both; the medians over the rounds and the median of the per-round
ratios are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/small/gpt_shakespeare_char.py")
    parser.add_argument("--text", required=True, help="training text")
    parser.add_argument("--peer", default="transformers", help="transformers, or the path of a nanoGPT checkout")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch_worker(options.peer, json.loads(options.worker))
        return

    step, model = ours(options.config, options.text)
    command = [sys.executable, "-m", "benchmarks.step_time", f"--text={options.text}", f"--peer={options.peer}"]
    worker = subprocess.Popen(
        [*command, f"--worker={json.dumps(model)}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def theirs(count):
        worker.stdin.write(f"{count}\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    step(options.steps), theirs(options.steps)  # warm-up
    rounds = [(step(options.steps), theirs(options.steps)) for _ in range(options.rounds)]
    worker.stdin.close()
    worker.wait()
    mine, others = zip(*rounds)
    ratios = [a / b for a, b in rounds]
    print(
        f"{model} on {os.cpu_count()} cores, ms per step, median of {options.rounds} rounds with {options.steps} steps:"
    )
    print(f"lineage            {statistics.median(mine):8.1f}  (from {min(mine):.1f} to {max(mine):.1f})")
    print(
        f"{Path(options.peer).name:18s} {statistics.median(others):8.1f}  (from {min(others):.1f} to {max(others):.1f})"
    )
    print(f"ratio              {statistics.median(ratios):8.2f}")


def ours(file, text):
    """Return a function that times training steps in ms, including data loading, and the sizes of the model."""
    import jax

    from lineage.configs import cli
    from lineage.runs.process import keep_freed
    from lineage.train.experiment import Experiment
    from lineage.train.loop import compile_step, device_batches

    keep_freed()
    config, _ = cli.load(file)
    cli.override(config, {"source": f"text:{text}"})
    experiment = Experiment(config)
    state = jax.jit(experiment.make_state, out_shardings=experiment.state_shardings)()
    function, batches = compile_step(experiment, state), device_batches(experiment, 0)
    model = experiment.model

    def step(count):
        nonlocal state
        start = time.perf_counter()
        for _ in range(count):
            state, metrics = function(state, next(batches))
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / count * 1e3

    sizes = {
        name: getattr(model, name) for name in ("depth", "width", "num_heads", "vocab_size", "dropout", "use_bias")
    }
    sizes |= {"batch": config.loader.batch_size, "length": config.task.sequence_length}
    return step, sizes


def transformers_peer(sizes):
    """Return GPT-2 of `transformers`, its optimizer and its loss."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), sizes["dropout"])
    config = GPT2Config(
        vocab_size=sizes["vocab_size"],
        n_positions=sizes["length"],
        n_embd=sizes["width"],
        n_layer=sizes["depth"],
        n_head=sizes["num_heads"],
        **rates,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def loss_of(x, y):
        logits = model(x).logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, sizes["vocab_size"]), y.reshape(-1))

    return model, optimizer, loss_of


def nanogpt_peer(folder, sizes):
    """Return the model of a nanoGPT checkout, its optimizer and its loss."""
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig

    config = GPTConfig(
        block_size=sizes["length"],
        vocab_size=sizes["vocab_size"],
        n_layer=sizes["depth"],
        n_head=sizes["num_heads"],
        n_embd=sizes["width"],
        dropout=sizes["dropout"],
        bias=sizes["use_bias"],
    )
    stdout, sys.stdout = sys.stdout, sys.stderr  # nanoGPT prints to standard output
    model = GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    sys.stdout = stdout

    def loss_of(x, y):
        return model(x, y)[1]

    return model, optimizer, loss_of


def torch_worker(peer, sizes):
    """Train the peer; for every number read from standard input, run that many steps and print the ms per step."""
    import torch

    shape = (sizes["batch"], sizes["length"])
    torch.manual_seed(0)
    model, optimizer, loss_of = transformers_peer(sizes) if peer == "transformers" else nanogpt_peer(peer, sizes)

    data = torch.from_numpy(np.random.default_rng(0).integers(0, sizes["vocab_size"], 100_000))

    def batch():
        starts = torch.randint(len(data) - shape[1] - 1, (shape[0],))
        x = torch.stack([data[i : i + shape[1]] for i in starts])
        return x, torch.stack([data[i + 1 : i + 1 + shape[1]] for i in starts])

    model.train()
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            loss = loss_of(*batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
        print((time.perf_counter() - start) / int(line) * 1e3, flush=True)


if __name__ == "__main__":
    main()
