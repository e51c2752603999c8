"""Runs on one device, for tests of the training loop."""

import jax

from lineage.runs.folder import read_metrics
from lineage.train import loop

ONE = jax.devices()[:1]


def run(config, workdir):
    """Train on one device and return the history."""
    loop.train(config, workdir, devices=ONE)
    return read_metrics(workdir)


def noisy(params):
    """Perturb parameters: a new model may predict the same probability for all classes, or ignore its memory."""
    return jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)


def losses(history):
    return [line["train/loss"] for line in train_lines(history)]


def train_lines(history):
    return [line for line in history if "train/loss" in line]
