"""Reinforcement learning of a decoder, with the correctness of the generated text as the reward."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lineage.metrics.likelihood import cross_entropy
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, Result, Weight
from lineage.tasks.losses import sums
from lineage.tasks.sequence_to_sequence import ConditionalLM


@TASKS.register("reinforcement")
@dataclass(frozen=True)
class Reinforcement(ConditionalLM):
    """Generate the target of an input; REINFORCE with a leave-one-out baseline (arXiv 2501.06252, section 3.2).

    There is no dropout, neither in the texts that are sampled in training nor in their likelihood.

    Attributes:
        kl: weight of the Kullback-Leibler divergence from the base model of an adapter, in training; 0 disables it.
    """

    label_smoothing: ClassVar[float] = 0.0  # not an option
    unused = ("dropout", "attention_dropout", "fused_loss")

    kl: Weight = 0.0

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the policy-gradient loss of tokens generated in place of `targets` where `mask` is True, both [B, T].

        The reward is 1 if all tokens are those of the target, and -1 otherwise (equation 1). Tokens are sampled in
        training; in evaluation, they are the most probable ones.
        """
        tokens, targets, mask = batch["tokens"], batch["targets"], batch["mask"]
        if model.is_initializing():
            model(tokens)
        policy, variables = model.unbind()
        training = model.has_rng("dropout")
        written = generate(policy, variables, batch, model.make_rng("dropout") if training else None)
        read = jnp.concatenate([tokens[:, :1], written[:, :-1]], axis=1)

        def log_likelihood(params):
            scores = -cross_entropy(policy.apply({**variables, "params": params}, read), written)
            return jnp.where(mask, scores, 0).sum(axis=1)

        penalty, likelihood = 0.0, log_likelihood(variables["params"])
        if self.kl and training:
            if jax.tree.structure(base := variables.get("reference")) != jax.tree.structure(variables["params"]):
                raise ValueError(f"task.kl is {self.kl}: it must be 0 without an adapter, or with adapter.trained.")
            penalty = self.kl * (likelihood - log_likelihood(base))
        correct = jnp.where(mask, written == targets, True).all(axis=1)
        real = mask.any(axis=1)
        return sums(policy_loss(likelihood, 2.0 * correct - 1 - penalty, real), real, {"accuracy": correct})


def policy_loss(
    log_likelihood: Float[Array, "B"], reward: Float[Array, "B"], real: Bool[Array, "B"]
) -> Float[Array, "B"]:
    """Return the negative reward of each sample, with the REINFORCE gradient estimator.

    The gradient is that of the log-likelihoods, weighted by the advantage: the reward minus the leave-one-out baseline,
    the mean reward of the other real samples (Kool et al. 2019).
    """
    reward = jax.lax.stop_gradient(reward)
    baseline = (jnp.where(real, reward, 0).sum() - reward) / jnp.maximum(real.sum() - 1, 1)
    advantage = reward - jnp.where(real.sum() > 1, baseline, 0)
    return (jax.lax.stop_gradient(log_likelihood) - log_likelihood) * advantage - reward


def generate(model, variables, batch, key):
    """Generate the targets [B, T] from the first True of each sequence's mask on.

    Tokens are sampled with a key; without a key, they are the most probable ones.
    """
    starts = batch["mask"].argmax(axis=1)
    variables = jax.lax.stop_gradient(variables)

    def advance(carry, place):
        token, cache = carry
        logits, cache = model.apply(variables, token[:, None], cache, None, method="decode")
        logits = logits[:, -1].astype(jnp.float32)
        action = logits.argmax(-1) if key is None else jax.random.categorical(jax.random.fold_in(key, place), logits)
        token = jnp.where(place < starts, batch["targets"][:, place], action.astype(token.dtype))
        return (token, cache), token

    tokens = batch["tokens"]
    cache = model.apply(variables, *tokens.shape, 0, method="init_cache")
    return jax.lax.scan(advance, (tokens[:, 0], cache), jnp.arange(tokens.shape[1]))[1].T
