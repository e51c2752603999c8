"""Runs on one device, for tests of the training loop."""

import jax

from lineage.runs.folder import read_metrics
from lineage.train import loop

ONE = jax.devices()[:1]


def run(config, workdir):
    """Train on one device and return the history."""
    loop.train(config, workdir, devices=ONE)
    return read_metrics(workdir)


def train_lines(history):
    return [line for line in history if "train/loss" in line]
