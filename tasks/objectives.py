"""What is learned: functions of a bound model and a batch.

Each returns `(loss_sum, weight, aux)`: the sum of the losses, the sum of their weights, and metric states by name.
Sums, not means, so that the gradients of a batch's parts add up to the whole's: loss = sum of sums / sum of weights.
An objective is called under `flax.linen.apply`; it is in training when the model has a "dropout" rng. The variable
`progress` of the collection "run" is then the part of the run's steps that is done, and `real` how many are True of
each mask in the whole batch, of which an objective may be given a part.
"""

import inspect
from collections.abc import Callable, Sequence
from operator import mul
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from lineage.metrics.classification import correct, correct_top_k
from lineage.metrics.likelihood import cross_entropy
from lineage.metrics.states import F1, Correlation, Matthews, Mean, State
from lineage.tasks import mixup as mixing
from lineage.tasks.matching import set_loss

Batch = dict[str, Array]
Result = tuple[Float[Array, ""], Float[Array, ""], dict[str, State]]
Objective = Callable[[nn.Module, Batch], Result]
NEVER = -1e9  # the logit of padding


def read(model: nn.Module, batch: Batch) -> Array | tuple[Array, Array]:
    """What the model says of a batch's images, or of its texts."""
    if "extent" in batch:
        rows, columns = (
            jnp.arange(size) + 0.5 < (extent * size)[:, None]
            for size, extent in zip(batch["image"].shape[1:3], batch["extent"].T)
        )
        return model(batch["image"], rows[:, :, None] & columns[:, None])
    if "image" in batch:
        return model(batch["image"])
    return model(batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])


def classification(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    binary: bool = False,
) -> Result:
    """Cross-entropy of `label` [B] given `image` [B, h, w, c], over the examples whose `mask` [B] is True.

    Or given a text or two, `tokens` and `segments` [B, T], of which those are seen where `tokens_mask` [B, T] is True.
    Labels may be soft: the probability of each class, [B, V].

    Args:
        label_smoothing: this part of the target is spread evenly over all classes (arXiv 1512.00567, section 7); in
            training only, so that evaluations compare.
        mixup, cutmix: in training, images and labels are mixed with the next example's, see `mixing.kept`.
        binary: the mean over all classes of the cross-entropy of each being there or not, and where images are mixed,
            those of both are there (arXiv 2110.00476, section 2), however little of them; timm's code has a least part.

    Raises:
        ValueError: there is nothing to mix one example with, or the examples are texts.
    """
    label, mask = batch["label"], batch["mask"]
    training = model.has_rng("dropout")
    mixed = training and bool(mixup or cutmix)
    if mixed:
        if "image" not in batch:
            raise ValueError("mixup and cutmix are for images: leave objective.mixup and objective.cutmix at 0.")
        image = batch["image"]
        if len(image) == 1:
            raise ValueError("mixup and cutmix need at least 2 examples in a batch, or in its accumulated parts.")
        pixels, share = mixing.kept(model.make_rng("dropout"), image.shape[1:3], mixup, cutmix)
        batch = batch | {"image": mixing.mix(image, pixels.astype(image.dtype))}
    logits = read(model, batch).astype(jnp.float32)
    target = jax.nn.one_hot(label, logits.shape[-1]) if label.ndim == 1 else label.astype(jnp.float32)
    label = target.argmax(axis=-1)
    if mixed:
        target = jnp.maximum(target, jnp.roll(target, 1, axis=0)) if binary else mixing.mix(target, share)
    if training:
        target = optax.smooth_labels(target, label_smoothing)
    if binary:
        loss = optax.sigmoid_binary_cross_entropy(logits, target).mean(axis=-1)
    else:
        loss = optax.softmax_cross_entropy(logits, target)
    means, states = {"accuracy": correct(logits, label)}, {}
    if logits.shape[-1] > 10:
        means["top_5_accuracy"] = correct_top_k(logits, label, 5)
    if "image" not in batch:
        for name, state in (("f1", F1), ("matthews", Matthews)):
            states[name] = state.empty(logits.shape[-1]).update(logits.argmax(axis=-1), label, mask)
    return _sums(loss, mask, means, **states)


def regression(model: nn.Module, batch: Batch) -> Result:
    """Squared error of the model's one output from `label` [B], over the examples whose `mask` [B] is True.

    Raises:
        ValueError: the model has several outputs.
    """
    values, label, mask = read(model, batch), batch["label"], batch["mask"]
    if values.shape[-1] != 1:
        raise ValueError(f"a regression has one output, not {values.shape[-1]}: set model.num_classes to 1.")
    values = values[..., 0].astype(jnp.float32)
    return _sums((values - label) ** 2, mask, pearson=Correlation.empty().update(values, label, mask))


def tagging(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """Cross-entropy of the tags `targets` [B, T] of words, at their first tokens, where `mask` [B, T] is True."""
    return _of_tokens(model, read(model, batch), batch, label_smoothing)


def span_extraction(model: nn.Module, batch: Batch) -> Result:
    """Mean cross-entropy of an answer's first and last token, `start` and `end` [B], each among all tokens of its text.

    Accuracy is of both together. Counted are the examples whose `mask` [B] is True.
    """
    logits = jnp.where(batch["tokens_mask"][..., None], read(model, batch).astype(jnp.float32), NEVER)
    first, last = logits[..., 0], logits[..., 1]
    loss = (cross_entropy(first, batch["start"]) + cross_entropy(last, batch["end"])) / 2
    both = correct(first, batch["start"]) & correct(last, batch["end"])
    return _sums(loss, batch["mask"], {"accuracy": both})


def causal_lm(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """Cross-entropy of `targets` [B, T], each given the `tokens` [B, T] up to its own, where `mask` [B, T] is True."""
    return _of_tokens(model, model(batch["tokens"]), batch, label_smoothing)


def masked_reconstruction(model: nn.Module, batch: Batch) -> Result:
    """Mean squared error of what the model predicts of the patches that it did not see, because of `noise` [B, P].

    Counted are those of the images whose `mask` [B] is True (arXiv 2111.06377, section 3).
    """
    predicted, hidden = model(batch["image"], batch["noise"])
    errors = jnp.square(predicted.astype(jnp.float32) - model.target(batch["image"])).mean(axis=-1)
    return _sums(errors, hidden & batch["mask"][:, None])


def masked_lm(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """Cross-entropy of `targets` [B, M] at the `places` [B, M] of hidden tokens, given all `tokens` [B, T].

    Counted where `mask` [B, M] is True; tokens are seen where `tokens_mask` [B, T] is True.
    """
    logits = model(batch["tokens"], mask=batch["tokens_mask"], places=batch["places"])
    return _of_tokens(model, logits, batch, label_smoothing)


def pretraining(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Result:
    """That of `masked_lm`, of two texts that `segments` [B, T] tell apart, and the cross-entropy of their `label` [B],
    which counts as much as M words: their mean losses are added where every text has M."""
    mask, whole = batch["tokens_mask"], batch["tokens_mask"][:, 0]
    logits, scores = model(batch["tokens"], segments=batch["segments"], mask=mask, places=batch["places"])
    words, weight, aux = _of_tokens(model, logits, batch, label_smoothing)
    texts = Mean.empty().update(cross_entropy(scores, batch["label"]), whole)
    aux["sentence_accuracy"] = Mean.empty().update(correct(scores, batch["label"]), whole)
    loss = words + batch["places"].shape[1] * texts.total
    return loss, weight, aux | {"loss": Mean(loss, weight), "masked_lm_loss": aux["loss"], "sentence_loss": texts}


def read_masked(model: nn.Module, batch: Batch) -> tuple[Float[Array, "B T D"], Float[Array, "B M V"]]:
    """An encoder's last vectors, and its logits of the hidden words."""
    hidden = model.encode(batch["tokens"], mask=batch["tokens_mask"])
    words = model.read(hidden, batch["places"])
    return hidden, words[0] if isinstance(words, tuple) else words


def distillation(
    model: nn.Module, batch: Batch, *, temperature: float = 2.0, weights: Sequence[float] = (5.0, 2.0, 1.0)
) -> Result:
    """DistilBERT's three losses (arXiv 1910.01108, section 3), for the batches of `masked_lm`, of which a teacher has
    said `teacher_logits` [B, M, V] and `teacher_hidden` [B, T, D].

    Args:
        temperature: what both models' logits of hidden words are divided by before the teacher's probabilities are the
            student's targets (arXiv 1503.02531); the loss is multiplied by its square.
        weights: of this loss, of `masked_lm`'s, and of 1 - the cosine of both models' last vectors, over all tokens.

    Raises:
        ValueError: the teacher has another number of words or another width, or there are not three weights.
    """
    if len(weights) != 3:
        raise ValueError(f"objective.weights is {tuple(weights)}: a distillation has three losses.")
    hidden, logits = (x.astype(jnp.float32) for x in read_masked(model, batch))
    their_hidden, their_logits = (batch[f"teacher_{name}"].astype(jnp.float32) for name in ("mlp_dim", "logits"))
    for ours, theirs, name in ((logits, their_logits, "vocab_size"), (hidden, their_hidden, "width")):
        if ours.shape != theirs.shape:
            raise ValueError(f"model.{name} is {ours.shape[-1]}: the teacher's is {theirs.shape[-1]}.")
    soft = _divergence(their_logits, logits, temperature)
    hard = cross_entropy(logits, batch["targets"])
    real, mask = batch["tokens_mask"], batch["mask"]
    cosine = (hidden * their_hidden).sum(-1) / jnp.maximum(_norm(hidden) * _norm(their_hidden), 1e-8)
    apart = ((1 - cosine) * real).sum(-1, keepdims=True) / jnp.maximum(real.sum(-1, keepdims=True), 1)
    parts = {"soft_loss": soft, "masked_lm_loss": hard, "cosine_loss": jnp.broadcast_to(apart, soft.shape)}
    return _weighted(weights, parts, mask, accuracy=correct(logits, batch["targets"]))


def distilled_classification(
    model: nn.Module,
    batch: Batch,
    *,
    temperature: float = 0.0,
    weights: Sequence[float] = (0.5, 0.5),
    label_smoothing: float = 0.0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> Result:
    """DeiT's two losses (arXiv 2012.12877, section 4): one head learns the `label` [B] of an image, or the
    probabilities of its classes `target` [B, V], the other one what a teacher said of it, `teacher_logits` [B, V].
    Accuracy is of their mean.

    Args:
        temperature: 0 makes the teacher's likeliest class the other head's label; above, its probabilities are the
            targets, see `distillation`.
        weights: of the loss of the label and of the teacher's.
        label_smoothing: see `cross_entropy`; of the label, in training only.
        mixup, cutmix: of the images, before the teacher sees them: see `Experiment.taught`.

    Raises:
        ValueError: the teacher has another number of classes, or there are not two weights.
    """
    if len(weights) != 2:
        raise ValueError(f"objective.weights is {tuple(weights)}: a distilled classification has two losses.")
    ours, logits = model.heads(batch["image"])
    label, mask, theirs = batch["label"], batch["mask"], batch["teacher_logits"]
    if logits.shape != theirs.shape:
        raise ValueError(f"model.num_classes is {logits.shape[-1]}: the teacher's is {theirs.shape[-1]}.")
    target = batch.get("target", jax.nn.one_hot(label, ours.shape[-1]))
    if model.has_rng("dropout"):
        target = optax.smooth_labels(target, label_smoothing)
    parts = {
        "label_loss": optax.softmax_cross_entropy(ours.astype(jnp.float32), target),
        "teacher_loss": (
            _divergence(theirs, logits, temperature) if temperature else cross_entropy(logits, theirs.argmax(axis=-1))
        ),
    }
    right = {"accuracy": correct(ours + logits, label), "teacher_accuracy": correct(theirs, label)}
    return _weighted(weights, parts, mask, **right)


def _divergence(theirs, ours, temperature):
    """Of our probabilities from theirs, of logits over a temperature (arXiv 1503.02531), times its square."""
    target, given = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (theirs, ours))
    return (jnp.exp(target) * (target - given)).sum(axis=-1) * temperature**2


def bidirectional_lm(model: nn.Module, batch: Batch) -> Result:
    """Cross-entropy of `targets` [B, T] given the `tokens` [B, T] up to each, and of the tokens given those after each.

    Counted where `mask` [B, T] is True, both directions alike; the last of the tokens is not guessed: none follows it.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    forward, backward = model(tokens, mask=mask)
    before = {"targets": tokens[:, :-1], "mask": mask[:, :-1] & mask[:, 1:]}
    (loss, weight, aux), (loss_before, weight_before, aux_before) = (
        _of_tokens(model, logits, part, 0.0) for logits, part in ((forward, batch), (backward[:, 1:], before))
    )
    aux = {name: aux[name].merge(aux_before[name]) for name in aux} | {"backward_loss": aux_before["loss"]}
    return loss + loss_before, weight + weight_before, aux


def reinforcement(model: nn.Module, batch: Batch, *, kl: float = 0.0) -> Result:
    """REINFORCE of what a decoder writes in the place of `targets` [B, T], where `mask` [B, T] is True.

    The reward is 1 if it writes the same, and -1 otherwise (arXiv 2501.06252, section 3.2, equation 1).

    In training it draws, without dropout, otherwise it takes the likeliest tokens. The loss is minus what is gained,
    see `policy_loss`.

    Args:
        kl: in training, what the Kullback-Leibler divergence from an adaptation's base costs.

    Raises:
        ValueError: there is a cost, but no base, or one that is not the whole model.
    """
    tokens, targets, mask = batch["tokens"], batch["targets"], batch["mask"]
    if model.is_initializing():
        model(tokens)
    policy, variables = model.unbind()
    training = model.has_rng("dropout")
    written = _written(policy, variables, batch, model.make_rng("dropout") if training else None)
    read = jnp.concatenate([tokens[:, :1], written[:, :-1]], axis=1)

    def likelihood(params):
        scores = -cross_entropy(policy.apply({**variables, "params": params}, read), written)
        return jnp.where(mask, scores, 0).sum(axis=1)

    apart, ours = 0.0, likelihood(variables["params"])
    if kl and training:
        if jax.tree.structure(base := variables.get("reference")) != jax.tree.structure(variables["params"]):
            raise ValueError(f"objective.kl is {kl}: it is for a run with an adapter without adapter.trained.")
        apart = kl * (ours - likelihood(base))
    right = jnp.where(mask, written == targets, True).all(axis=1)
    real = mask.any(axis=1)
    return _sums(policy_loss(ours, 2.0 * right - 1 - apart, real), real, {"accuracy": right})


def policy_loss(likelihood: Float[Array, "B"], gained: Float[Array, "B"], real: Bool[Array, "B"]) -> Float[Array, "B"]:
    """Minus what samples have `gained`, with a gradient that is right in expectation (REINFORCE): that of their
    log-likelihoods, weighted by what each gained beyond the others' mean (Kool et al. 2019)."""
    gained = jax.lax.stop_gradient(gained)
    others = (jnp.where(real, gained, 0).sum() - gained) / jnp.maximum(real.sum() - 1, 1)
    return (jax.lax.stop_gradient(likelihood) - likelihood) * (gained - jnp.where(real.sum() > 1, others, 0)) - gained


def _written(model, variables, batch, key):
    """Targets [B, T] as the model writes them from each row's first True of the mask on."""
    starts = batch["mask"].argmax(axis=1)
    variables = jax.lax.stop_gradient(variables)

    def advance(carry, place):
        token, cache = carry
        logits, cache = model.apply(variables, token[:, None], cache, None, method="decode")
        logits = logits[:, -1].astype(jnp.float32)
        own = logits.argmax(-1) if key is None else jax.random.categorical(jax.random.fold_in(key, place), logits)
        token = jnp.where(place < starts, batch["targets"][:, place], own.astype(token.dtype))
        return (token, cache), token

    tokens = batch["tokens"]
    cache = model.apply(variables, *tokens.shape, method="init_cache")
    return jax.lax.scan(advance, (tokens[:, 0], cache), jnp.arange(tokens.shape[1]))[1].T


def sequence_to_sequence(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    scheduled_sampling: float = 0.0,
    decay: str = "linear",
) -> Result:
    """Cross-entropy of `targets` [B, T], each given all `inputs` [B, S] and the `tokens` [B, T] up to its own.

    Counted where `mask` [B, T] is True; of the inputs, those where `inputs_mask` [B, S] is True are seen.

    Args:
        label_smoothing: see `cross_entropy`; in training only.
        scheduled_sampling: in training, the part of the tokens in whose place the model reads its own prediction at the
            end of the run (arXiv 1506.03099); it begins at 0.
        decay: a name of `DECAYS`: how the part of the tokens that it is given falls meanwhile.

    Raises:
        ValueError: the decay is unknown, or the model cannot read its own predictions in training.
    """
    options = {}
    if scheduled_sampling:
        if decay not in DECAYS:
            raise ValueError(f"objective.decay is {decay!r}: it must be one of {', '.join(DECAYS)}.")
        if "own_rate" not in inspect.signature(type(model).__call__).parameters:
            raise ValueError(f"scheduled sampling is for seq2seq: {type(model).__name__} is given all tokens at once.")
        if model.has_rng("dropout"):
            progress = model.get_variable("run", "progress", 0.0)
            options["own_rate"] = 1 - DECAYS[decay](progress, 1 - scheduled_sampling)
    if model.has_rng("dropout") and getattr(model, "norm", "") in ("batch", "power"):
        options["mask"] = batch["mask"]  # what follows a target's end is not to count in their statistics
    logits = model(batch["inputs"], batch["tokens"], inputs_mask=batch["inputs_mask"], **options)
    return _of_tokens(model, logits, batch, label_smoothing)


# From (about) 1 at progress 0 to `end` at progress 1 (arXiv 1506.03099, section 2.4); 100 is the sigmoid's k.
DECAYS = {
    "linear": lambda progress, end: 1 - (1 - end) * progress,
    "exponential": lambda progress, end: end**progress,
    "inverse_sigmoid": lambda progress, end: 100 / (100 + (100 * (1 - end) / end) ** progress),
}


def detection(model: nn.Module, batch: Batch, *, weights: Sequence[float] = (1.0, 5.0, 2.0)) -> Result:
    """DETR's loss (arXiv 2005.12872) of the objects that a model finds, see `set_loss`.

    Args:
        weights: of the classes, of the distances of the boxes and of their generalised IoU.

    Raises:
        ValueError: there are not three weights, or the model has too few queries.
    """
    if len(weights) != 3:
        raise ValueError(f"objective.weights is {tuple(weights)}: a detection has three losses.")
    logits, boxes = read(model, batch)
    real = batch["boxes_mask"] & batch["mask"][:, None]
    if logits.shape[2] < real.shape[1]:
        raise ValueError(
            f"model.num_queries is {logits.shape[2]}: data.max_boxes is {real.shape[1]}, it must be at most that."
        )
    whole = {"mask": batch["mask"].sum(), "boxes_mask": real.sum().astype(jnp.float32)}
    return set_loss(logits, boxes, batch, weights, model.get_variable("run", "real", whole))


def _of_tokens(model, logits, batch, label_smoothing):
    loss = cross_entropy(logits, batch["targets"], label_smoothing if model.has_rng("dropout") else 0.0)
    return _sums(loss, batch["mask"], {"accuracy": correct(logits, batch["targets"])})


def _norm(x):
    return jnp.linalg.norm(x, axis=-1)


def _weighted(weights, losses, mask, **means):
    """The sum of several losses."""
    return _sums(sum(map(mul, weights, losses.values())), mask, means | losses)


def _sums(loss, mask, means=MappingProxyType({}), **states):
    """The result, of the losses that the mask lets through, the means of other values, and states."""
    means = {name: Mean.empty().update(value, mask) for name, value in {"loss": loss, **means}.items()}
    return means["loss"].total, means["loss"].weight, means | states


OBJECTIVES = {
    objective.__name__: objective
    for objective in (
        *(classification, regression, tagging, span_extraction, causal_lm, masked_lm, pretraining),
        *(masked_reconstruction, distillation, distilled_classification, bidirectional_lm, sequence_to_sequence),
        *(detection, reinforcement),
    )
}
# objective -> the head that an encoder of texts needs for it
HEADS = {
    "classification": "classification",
    "regression": "classification",
    "tagging": "tagging",
    "span_extraction": "span",
    "masked_lm": "masked_lm",
    "pretraining": "pretraining",
}
TAUGHT = ("distillation", "distilled_classification")  # what needs a teacher
# objective -> the tasks of `data.tasks` that it is for
TASKS = {
    "classification": ("images", "classification"),
    "regression": ("regression",),
    "tagging": ("tagging",),
    "span_extraction": ("spans",),
    "causal_lm": ("next_token", "continuations"),
    "reinforcement": ("continuations",),
    "bidirectional_lm": ("next_token",),
    "masked_lm": ("masked_tokens",),
    "masked_reconstruction": ("masked_images",),
    "distillation": ("masked_tokens",),
    "distilled_classification": ("images",),
    "pretraining": ("next_sentence", "sentence_order"),
    "detection": ("detection",),
    "sequence_to_sequence": ("pairs", "span_corruption", "denoising"),
}
