"""Mixtures of SVF experts, chosen for a task by examples or by a prompt (arXiv 2501.06252)."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental.multihost_utils import process_allgather
from jaxtyping import Bool, Float, Int

from lineage.configs.storage import local
from lineage.data.tokenizers import FILE, Tokenizer
from lineage.evaluation.likelihood import LanguageModel
from lineage.runs.data_record import model_files
from lineage.train import distributed
from lineage.train.adapters import SVF
from lineage.train.experiment import Experiment
from lineage.train.pretrained import with_variables
from lineage.train.reading import read_newest
from lineage.train.sharding import to_mesh
from lineage.train.step import TrainState, make_forward_step

Weights = Float[np.ndarray, "K"]  # weights of the experts
ROUNDS, POPULATION, ELITE = 12, 24, 6  # of `cross_entropy_search`


def choose(
    experiment: Experiment, state: TrainState, prompt: str | None = None, base_path: str | os.PathLike = ""
) -> tuple[TrainState, str]:
    """Return the state with the parameters of the mixture that `config.experts` describes, and a message about it.

    If `experts.choice` is "prompt", the prompt determines the mixture, or without one, examples of the training data.

    Args:
        base_path: folder that the model in `state` was loaded from; "": it is a new model, which the experts replace.

    Raises:
        ValueError: an expert has another tokenizer than the run, or another base model than that in `base_path`.
    """
    settings = experiment.config.experts
    if not settings.paths:
        raise ValueError("experts.paths is empty: it must name the workdirs of the experts to choose from.")
    if jax.process_count() > 1:
        files = [model_files(path) for path in (*settings.paths, settings.classifier) if path]
        distributed.check_same(f"one of the experts in {', '.join(settings.paths)}", json.dumps(files))
    experts = load(settings.paths)
    names = list(experts)
    base = next(iter(experts.values()))
    changed = jax.tree_util.Partial(_mixed, base.adapter, base.frozen, [trained.params for trained in experts.values()])
    theirs, ours = jax.eval_shape(changed, np.zeros(len(names))), jax.eval_shape(TrainState.variables, state)["params"]
    if jax.tree.map(lambda a: a.shape, theirs) != jax.tree.map(lambda a: a.shape, ours):
        raise ValueError(f"experts.paths: {names[0]} has another model than the config.")
    _check_tokenizers(experiment)
    if base_path and not _has_base(state, base):
        raise ValueError(f"experts.paths: {names[0]} was trained from a different base model than that in {base_path}.")
    if settings.choice == "few_shot":
        score = _scorer(experiment, changed, state.collections)
        weights = cross_entropy_search(score, len(names), seed=experiment.config.seed)
    else:
        if settings.classifier:
            (expert,) = load([settings.classifier], base).values()
            classifier = _mixed(expert.adapter, expert.frozen, [expert.params], np.ones(1))
        else:
            classifier = base.adapter.apply(base.frozen, {})
        weights = np.eye(len(names))[_answer(experiment, classifier, names, prompt)]
    mixture = ", ".join(f"{name} {weight:.2f}" for name, weight in zip(names, weights))
    return with_variables(state, {"params": changed(weights)}), f"experts: {mixture}"


def _mixed(adapter, frozen, experts, weights):
    """Return the parameters of the model with a mixture of experts."""
    return adapter.apply(frozen, adapter.mixture(jnp.asarray(weights, jnp.float32), experts))


def load(paths: Sequence[str | os.PathLike], base: TrainState | None = None) -> dict[str, TrainState]:
    """Return the states of the experts in the given workdirs, by folder name.

    All experts, including `base`, must share one frozen model.
    """
    states = {}
    for path in (Path(local(path)) for path in paths):
        state = read_newest(path)
        if not isinstance(state.adapter, SVF) or state.adapter.trained:
            raise ValueError(f"experts: {path} is not a run of adapter.name='svf' without adapter.trained.")
        if path.name in states:
            raise ValueError(f"experts.paths: two folders are called {path.name}: each needs a unique name.")
        base = base or state
        if not state.adapter.same_base(state.frozen, base.frozen):
            raise ValueError(f"experts.paths: {path} was trained from a different base model than the others.")
        states[path.name] = state
    return states


def _check_tokenizers(experiment):
    """Raise ValueError if an expert has another tokenizer than the experiment."""
    for path in experiment.config.experts.paths:
        file = Path(local(path), FILE)
        if experiment.tokenizer and file.exists() and Tokenizer.load(file).to_str() != experiment.tokenizer.to_str():
            raise ValueError(f"experts.paths: the tokenizer of {path} differs from that of the run.")


def _has_base(state, expert):
    """Return whether a model has the parameters of an expert's base that the expert does not adapt."""
    ours = flatten_dict(state.variables(average=True)["params"], sep="/")
    theirs = flatten_dict(expert.frozen["params"], sep="/")
    adapted = {f"{path.rpartition('/')[0]}/kernel" for path in flatten_dict(expert.frozen[SVF.prefix], sep="/")}
    names = sorted(theirs.keys() - adapted)  # in the same order in all processes
    return bool(_are_equal([ours[name] for name in names], [theirs[name] for name in names]))


@jax.jit
def _are_equal(ours, theirs):
    return jnp.all(jnp.array(list(map(jnp.array_equal, ours, theirs)), bool))


def cross_entropy_search(score: Callable[[Weights], float], size: int, *, seed: int) -> Weights:
    """Maximize a score over `size` numbers by the cross-entropy method (Rubinstein & Kroese 2004).

    In each round a population is drawn from a normal distribution, which is then fitted to the elite of the population.
    Noise added to its standard deviation, less in each round, prevents premature convergence (Szita & Lőrincz 2006).
    The result is the mean of the last distribution.
    """
    random, mean, spread = np.random.default_rng(seed), np.full(size, 1 / size), np.full(size, 0.5)
    for done in range(ROUNDS):
        drawn = random.normal(mean, spread, (POPULATION, size))
        scores = np.nan_to_num([score(weights) for weights in drawn], nan=-np.inf)
        best = drawn[np.argsort(scores)[-ELITE:]]
        mean, spread = best.mean(axis=0), best.std(axis=0) + 0.5 * max(0.5 - done / ROUNDS, 0)
    return mean


def _examples(experiment):
    """Return the first training batch, and how many of its first examples this process uses."""
    count = experiment.config.experts.examples
    if count > experiment.loader.batch_size:
        raise ValueError(f"experts.examples is {count}: it must be at most loader.batch_size.")
    return dict(experiment.data.train[0]), -(-count // jax.process_count())


def _scorer(experiment, changed, collections):
    """Return the function from the weights of the experts to minus the loss of the examples."""
    batch, count = _examples(experiment)
    rows = np.arange(len(batch["mask"])) < count
    batch["mask"] = batch["mask"] & rows.reshape(-1, *[1] * (batch["mask"].ndim - 1))
    batch = experiment.with_teacher(to_mesh(batch, experiment.mesh))
    forward = make_forward_step(experiment.model, experiment.task.loss, experiment.config.precision, mutable=["memory"])
    collections = {name: value for name, value in collections.items() if name != "memory"}

    @experiment.jit
    def loss(changed, weights, batch):
        (_, _, states), _ = forward({**collections, "params": changed(weights)}, batch)
        return states["loss"].compute()

    return lambda weights: -float(loss(changed, jnp.asarray(weights, jnp.float32), batch))


def _answer(experiment, params, names, prompt):
    """Return the index of the most probable name as the answer about the prompt, or about all examples."""
    settings, tokenizer = experiment.config.experts, experiment.tokenizer
    if tokenizer is None or not experiment.model.is_decoder:
        raise ValueError("experts.choice is 'prompt': it must be 'few_shot' for models that do not generate text.")
    if not all(field in settings.question for field in ("{text}", "{name}")):
        raise ValueError(f"experts.question is {settings.question!r}: it must have {{text}} and {{name}}.")
    if prompt is None:
        batch, count = _examples(experiment)
        rows = [input_tokens(*row) for row in zip(batch["tokens"][:count], batch["mask"])]
        texts = [tokenizer.decode(row[row != experiment.facts.begin_token]) for row in rows]
    else:
        texts = [prompt]
    model = LanguageModel(experiment.model, {"params": params}, tokenizer, experiment.facts.begin_token)
    total = np.zeros(len(names))
    for text in texts:
        rows = [model.encode(settings.question.format(text=text, name=name)) for name in names]
        start, shortest = 1, min(map(len, rows))
        while start < shortest - 1 and len({int(row[start]) for row in rows}) == 1:
            start += 1  # after the tokens that all questions share
        total += [answer.log for answer in model.of_tokens([(row[:start], row[start:]) for row in rows])]
    return int(process_allgather(total, tiled=True).reshape(-1, len(names)).sum(axis=0).argmax())


def input_tokens(tokens: Int[np.ndarray, "T"], mask: Bool[np.ndarray, "T"]) -> Int[np.ndarray, "N"]:
    """Return the tokens of an example that a question is about, given the mask of the tokens before its targets.

    They are those of the input, before the first target's; of a text without an input, all but the padding.
    """
    first = int(mask.argmax())
    return tokens[:first] if first else tokens[mask]
