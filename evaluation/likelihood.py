"""Log-likelihoods of texts by a causal language model: perplexity, and choices as in the LM evaluation harness."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lineage.data import Tokenizer
from lineage.data.content import padded
from lineage.data.examples.pairs import after
from lineage.metrics.classification import auroc
from lineage.metrics.diversity import sentence_burstiness
from lineage.metrics.likelihood import bits, cross_entropy, perplexity
from lineage.models import Model

LENGTH = 2048  # window length in tokens for models without a maximum length
_MULTIPLE = 32  # pad lengths to multiples of this value to limit recompilation


class Likelihood(NamedTuple):
    """Likelihood of a text.

    Attributes:
        log: natural logarithm of the probability of its tokens.
        is_greedy: whether each token is the most probable one.
        tokens: number of tokens that were predicted.
    """

    log: float
    is_greedy: bool
    tokens: int


class LanguageModel:
    """Causal language model that computes likelihoods; texts of similar length are batched together.

    `start` is the token before a text without a context: `begin`, the token before each text, or else the end of text;
    None if the tokenizer has none.
    """

    def __init__(
        self, model: Model, variables: Any, tokenizer: Tokenizer, begin: int | None = None, batch_size: int = 8
    ):
        if "next_token" not in model.outputs:
            raise ValueError(f"The model is a {type(model).__name__}: likelihoods need a causal language model.")
        self.model, self.variables, self.tokenizer, self.batch_size = model, variables, tokenizer, batch_size
        self.length, self.begin = model.max_length or LENGTH, begin
        self.start = tokenizer.end_of_text if begin is None else begin

        @jax.jit
        def forward(variables: Any, tokens: Int[Array, "B N"]) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
            logits, targets = model.apply(variables, tokens[:, :-1]), tokens[:, 1:]
            return -cross_entropy(logits, targets), logits.argmax(axis=-1) == targets

        self._forward = forward

    def of_continuations(self, pairs: Iterable[tuple[str, str]]) -> list[Likelihood]:
        """Return the likelihood of each second text after the first one.

        Trailing white space of the first text belongs to the second one. If a pair is too long, its first text is cut
        at the beginning.
        """
        return self.of_tokens([self._encode_pair(*pair) for pair in pairs])

    def of_texts(self, texts: Sequence[str]) -> list[Likelihood]:
        """Return the likelihood of each text after `start`; without a `start`, the first token is not predicted.

        Long texts are split into windows without overlap, except for the last one, which has as much context as the
        model allows.
        """
        rows, windows = [], []
        for row, ids in enumerate(self.tokenizer.encode_batch(texts)):
            ids = after(self.start, ids)
            for start in range(1, len(ids), self.length):
                stop = min(start + self.length, len(ids))
                rows.append(row)
                windows.append((ids[max(stop - self.length - 1, 0) : start], ids[start:stop]))
        totals = [Likelihood(0.0, True, 0)] * len(texts)
        for row, part in zip(rows, self.of_tokens(windows)):
            log, is_greedy, tokens = totals[row]
            totals[row] = Likelihood(log + part.log, is_greedy and part.is_greedy, tokens + part.tokens)
        return totals

    def of_tokens(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Likelihood]:
        """Return the likelihood of token ids [N] after a context [M], for each pair; M is at least 1.

        Raises:
            ValueError: N is 0: the text has no more tokens than its context; or N exceeds the window.
        """
        for number, (context, continuation) in enumerate(pairs, 1):
            if not len(continuation):
                end = self.tokenizer.decode(context)[-60:]
                raise ValueError(f"Continuation {number} has no token: it must add one to its context, {end!r}.")
            if (size := len(continuation)) > self.length:
                allowed = f"it must have at most {self.length}, the maximum length of the model"
                raise ValueError(f"Continuation {number} has {size} tokens: {allowed}.")
        rows = [np.concatenate(pair)[-self.length - 1 :] for pair in pairs]
        likelihoods = {}
        for batch, size in by_length([len(row) - 1 for row in rows], self.batch_size, _MULTIPLE, self.length):
            tokens = np.zeros((self.batch_size, size + 1), np.int32)
            tokens[: len(batch)] = padded([rows[i] for i in batch], size + 1)
            logs, right = map(np.asarray, self._forward(self.variables, tokens))
            for place, i in enumerate(batch):
                stop, count = len(rows[i]) - 1, len(pairs[i][1])
                scored = slice(stop - count, stop)
                likelihoods[i] = Likelihood(float(logs[place, scored].sum()), bool(right[place, scored].all()), count)
        return [likelihoods[i] for i in range(len(rows))]

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids int32 [N] of a text, after `begin` if there is one."""
        return after(self.begin, self.tokenizer.encode(text))

    def _encode_pair(self, context, continuation):
        both, first = map(self.encode, (context + continuation, context.rstrip()))
        if len(first):
            return first, both[len(first) :]
        if self.start is None:
            return both[:1], both[1:]
        return np.array([self.start]), both


def by_length(lengths: Sequence[int], batch_size: int, multiple: int, longest: int) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of each batch of rows of similar lengths, and the length to which the rows are padded.

    The length is a multiple of `multiple`, to limit recompilation, or `longest`.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        yield batch, min(-(-lengths[batch[-1]] // multiple) * multiple, longest)


class Choice(NamedTuple):
    """Question with several answers: the text before an answer, the answers, and the index of the correct one."""

    context: str
    answers: Sequence[str]
    label: int


def _hellaswag(row: Mapping[str, Any]) -> Choice:
    def clean(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return Choice(context, [clean(ending) for ending in row["endings"]], int(row["label"]))


def _piqa(row: Mapping[str, Any]) -> Choice:
    return Choice(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


# The published JSON lines of a benchmark -> its questions, written as the LM evaluation harness does.
CHOICES: dict[str, Callable[[Mapping[str, Any]], Choice]] = {"hellaswag": _hellaswag, "piqa": _piqa}


def choice_scores(name: str, model: LanguageModel, rows: Sequence[Any]) -> dict[str, float]:
    """Return the accuracies of the answers with the highest log-likelihood, and with the highest one per character.

    Raises:
        ValueError: a row does not have the format of the benchmark `name`, one of `CHOICES`.
    """
    questions = [_read(CHOICES[name], row, number, name) for number, row in enumerate(rows, 1)]
    pairs = [(question.context, f" {answer}") for question in questions for answer in question.answers]
    logs, right, right_by_length = iter(model.of_continuations(pairs)), [], []
    for question in questions:
        scores = np.array([next(logs).log for _ in question.answers])
        right.append(scores.argmax() == question.label)
        right_by_length.append((scores / [len(answer) for answer in question.answers]).argmax() == question.label)
    return {"accuracy": float(np.mean(right)), "accuracy_by_length": float(np.mean(right_by_length))}


def last_word_scores(model: LanguageModel, texts: Sequence[str]) -> dict[str, float]:
    """Return the accuracy and the perplexity of the last word of each text, as in LAMBADA (arXiv 1606.06031)."""
    if short := [text for text in texts if " " not in text]:
        raise ValueError(f"The text {short[0]!r} has no last word: texts of LAMBADA have words with spaces between.")
    pairs = [(first, f" {last}") for first, _, last in (text.rpartition(" ") for text in texts)]
    likelihoods = model.of_continuations(pairs)
    nats = -np.mean([word.log for word in likelihoods])
    return {"accuracy": float(np.mean([word.is_greedy for word in likelihoods])), "perplexity": perplexity(nats)}


def perplexity_scores(model: LanguageModel, texts: Sequence[str]) -> dict[str, float]:
    """Return the perplexity of all tokens of the texts, and the bits per UTF-8 byte."""
    likelihoods = model.of_texts(texts)
    nats = -sum(likelihood.log for likelihood in likelihoods)
    tokens = sum(likelihood.tokens for likelihood in likelihoods)
    if not tokens:
        raise ValueError("The texts have no token to predict.")
    size = sum(len(text.encode()) for text in texts)
    return {"perplexity": perplexity(nats / tokens), "bits_per_byte": bits(nats, size), "tokens": tokens}


def detection_scores(
    model: LanguageModel, machine: Sequence[str], human: Sequence[str], samples: int, seed: int
) -> dict[str, float]:
    """Return areas under the ROC curve for the detection of machine-generated among human-written texts.

    Generated texts have a low perplexity, and sentences of similar lengths (low burstiness). "both" adds the
    logarithm of the perplexity and the burstiness, each divided by its standard deviation over all texts. "low" and
    "high" are the bounds of the 95% confidence intervals from bootstrap samples. Each text needs a word, and a token to
    predict.
    """
    texts, labels = [*machine, *human], np.arange(len(machine) + len(human)) < len(machine)
    likelihoods = model.of_texts(texts)
    if short := [text for text, likelihood in zip(texts, likelihoods) if not likelihood.tokens]:
        raise ValueError(f"The text {short[0]!r} has no token to predict.")
    nats = np.array([-likelihood.log / likelihood.tokens for likelihood in likelihoods])
    bursts = np.array([sentence_burstiness(text) for text in texts])
    parts = {"perplexity": nats, "burstiness": bursts}
    parts["both"] = sum(part / (part.std() or 1) for part in parts.values())
    random, scores = np.random.default_rng(seed), {}
    drawn = [random.integers(0, len(labels), len(labels)) for _ in range(samples)]
    for name, values in parts.items():
        areas = [auroc(-values[chosen], labels[chosen]) for chosen in drawn]
        low, high = np.nanquantile(areas, [0.025, 0.975]) if samples else (math.nan, math.nan)
        scores |= {f"auroc_{name}": auroc(-values, labels), f"auroc_{name}_low": low, f"auroc_{name}_high": high}
    return scores


def _read(make, row, number, name):
    try:
        if not isinstance(row, dict):
            raise TypeError("it is not an object")
        question = make(row)
        if not 0 <= question.label < len(question.answers) or not all(question.answers):
            raise ValueError(f"the label {question.label} is not one of its {len(question.answers)} answers")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        entry = json.dumps(row)[:80]
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"Entry {number}, {entry}, is not an entry of {name}: {reason}.") from None
    return question
