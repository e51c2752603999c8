"""Masked language modeling (BERT), with a teacher (DistilBERT), and on pairs of texts (BERT, ALBERT)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lineage.data import Documents, Examples, ExampleSource, Facts, Tokenizer
from lineage.data.content import check_length, padded
from lineage.data.examples import encoded
from lineage.data.examples.encoded import Encoded
from lineage.data.examples.masking import MaskTokens, count_masked
from lineage.data.examples.windows import Chunks, PairSentences, Sentences
from lineage.metrics.classification import correct
from lineage.metrics.likelihood import cross_entropy
from lineage.metrics.states import Mean, Total
from lineage.models import Model
from lineage.tasks.base import TASKS, Batch, InputExamples, MaskRate, Result, Sizes, Weight, Weights
from lineage.tasks.losses import divergence, token_loss, weighted
from lineage.tasks.prediction import TOP
from lineage.tasks.text import DocumentTask, mean_hidden


@TASKS.register("masked_lm")
@dataclass(frozen=True)
class MaskedLM(DocumentTask):
    """Predict the masked tokens of a text (BERT, arXiv 1810.04805, section 3.1).

    Attributes:
        mask_rate: fraction of the tokens that is masked.
        whole_words: whether to mask all tokens of a word, or none; a part of a word only if none fits.
    """

    needs = ("masked_lm",)
    head = "masked_lm"
    begins = True
    # Includes the tokens for fine-tuning.
    special_tokens = ("end_of_text", "cls", "sep", "pad", "mask")
    optional_tokens = ("end_of_text",)
    inputs = ("tokens", "tokens_mask")
    arrays: ClassVar = {
        "tokens": "int32 B T",
        "tokens_mask": "bool B T",
        "masked_positions": "int32 B M",
        "targets": "int32 B M",
        "mask": "bool B M",
    }

    mask_rate: MaskRate = 0.15
    whole_words: bool = False

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        mask = MaskTokens(self.mask_rate, tokenizer, self.whole_words, self.begin_token(tokenizer))
        check_length(self.sequence_length, 1 + len(mask.ends))
        return self.windows(content, tokenizer, self.sequence_length - len(mask.ends), mask)

    def input_examples(self, rows: Sequence[str], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        return InputExamples(masked_texts(rows, tokenizer, self.sequence_length, joined=facts.begin_token is not None))

    def begin_token(self, tokenizer: Tokenizer) -> int | None:
        if self.known or not self.begins:
            return super().begin_token(tokenizer)
        return tokenizer.cls if tokenizer.encloses else None

    def axes(self, sizes: Sizes) -> dict[str, int]:
        axes = super().axes(sizes)
        return axes | {"M": count_masked(self.mask_rate, axes["T"])}

    def forward(self, model: Model, batch: Batch) -> Any:
        return model(batch["tokens"], mask=batch["tokens_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the cross-entropy of `targets` at `masked_positions`, where `mask` is True, each [B, M].

        The model attends to `tokens` [B, T] where `tokens_mask` [B, T] is True; batches may have `segments` [B, T].
        """
        others = {name: batch[name] for name in ("masked_positions", "segments") if name in batch}
        logits = model(batch["tokens"], mask=batch["tokens_mask"], **others)
        return token_loss(model, logits, batch, self.label_smoothing)

    def outputs(self, model: Model, batch: Batch) -> Any:
        """Return the probabilities [B, M, TOP] and ids of the most probable tokens in place of masks."""
        _, logits = hidden_and_logits(model, batch)
        return jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), min(TOP, logits.shape[-1]))

    def predict(self, outputs: Any, inputs: ExampleSource, facts: Facts) -> list[dict[str, Any]]:
        """Return each text with the most probable tokens in place of masks, and the candidates for each mask."""
        predictions, tokenizer = [], inputs.tokenizer
        for tokens, *best in zip(inputs.tokens, *outputs):
            is_mask = tokens == tokenizer.mask
            probabilities, ids = (values[: is_mask.sum()] for values in best)
            filled = tokens.copy()
            filled[is_mask] = ids[:, 0]
            masks = [
                [{"token": tokenizer.decode([id]), "probability": float(chance)} for id, chance in zip(*mask)]
                for mask in zip(ids, probabilities)
            ]
            text = tokenizer.decode(filled[is_mask | ~tokenizer.special[tokens]])
            predictions.append({"prediction": text, "masks": masks})
        return predictions

    def features(self, model: Model, batch: Batch) -> Any:
        return mean_hidden(model, batch)


@dataclass(frozen=True)
class MaskedTexts(Encoded):
    """Sequences with at most M masks each; `masked_positions` int32 [M] are padded with 0."""

    tokenizer: Tokenizer | None = None


def masked_texts(texts: Sequence[str], tokenizer: Tokenizer, length: int, joined: bool = False) -> MaskedTexts:
    """Encode texts that contain the name of the mask token; with `joined`, as `[CLS] text [SEP]`."""
    encodings, room = tokenizer.encode_marked(texts), length - 2 * joined
    cut = sum(len(tokens) > room for tokens in encodings)
    rows = [encoded.join(tokenizer, ids[:room]) if joined else (ids[:room], length) for ids in encodings]
    places = [np.flatnonzero(tokens == tokenizer.mask) for tokens, _ in rows]
    count = max(1, *map(len, places))
    positions = padded(places, -(-count // 8) * 8).astype(np.int32)  # few different shapes to compile
    others = {"per_sequence": {"masked_positions": positions}, "tokenizer": tokenizer, "cut": cut}
    return encoded.collect(rows, range(len(rows)), length, tokenizer, MaskedTexts, **others)


@TASKS.register("masked_lm_distillation")
@dataclass(frozen=True)
class MaskedLMDistillation(MaskedLM):
    """Masked language modeling with distillation from a teacher (DistilBERT, arXiv 1910.01108, section 3).

    Attributes:
        temperature: distillation temperature; 0: hard distillation, with the teacher's most probable token as target.
        weights: weights of the distillation loss, of the masked language modeling loss, and of 1 - the cosine
            similarity of the last hidden states of both models.
        all_tokens: compute the distillation loss on all tokens, as the authors' code does, or only on the masked ones,
            which needs less memory: the logits of both models are kept for these tokens.
    """

    needs = ("masked_lm", "pretraining")
    needs_teacher = True
    losses = ("teacher", "masked language modeling", "cosine")
    label_smoothing: ClassVar[float] = 0.0  # not an option

    temperature: Weight = 2.0
    weights: Weights = (5.0, 2.0, 1.0)
    all_tokens: bool = True

    def teach(self, teacher: Model, batch: Batch) -> Batch:
        hidden, logits = hidden_and_logits(teacher, batch, self.all_tokens)
        return {"teacher_hidden": hidden, "teacher_logits": logits}

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the weighted sum of the three losses, given `teacher_hidden` [B, T, D] and `teacher_logits`.

        These are [B, T, V] with `all_tokens`, else [B, M, V]. Each loss is a mean over the tokens of a text.
        """
        hidden, logits = (x.astype(jnp.float32) for x in hidden_and_logits(model, batch, self.all_tokens))
        target_hidden, target_logits = (batch[f"teacher_{name}"].astype(jnp.float32) for name in ("hidden", "logits"))
        for student, teacher, name in ((logits, target_logits, "vocab_size"), (hidden, target_hidden, "width")):
            if student.shape != teacher.shape:
                raise ValueError(f"model.{name} is {student.shape[-1]}: the teacher's is {teacher.shape[-1]}.")
        targets, soft = batch["targets"], divergence(target_logits, logits, self.temperature)

        def mean(losses):
            """Return the mean over the real tokens [B, T] of each text, for each masked token [B, M]."""
            real = batch["tokens_mask"]
            means = (losses * real).sum(-1, keepdims=True) / jnp.maximum(real.sum(-1, keepdims=True), 1)
            return jnp.broadcast_to(means, targets.shape)

        if self.all_tokens:
            soft = mean(soft)
            logits = jnp.take_along_axis(logits, batch["masked_positions"][..., None], axis=1)
        norms = jnp.linalg.norm(hidden, axis=-1) * jnp.linalg.norm(target_hidden, axis=-1)
        cosine = (hidden * target_hidden).sum(-1) / jnp.maximum(norms, 1e-8)
        losses = {"soft_loss": soft, "masked_lm_loss": cross_entropy(logits, targets), "cosine_loss": mean(1 - cosine)}
        return weighted(self.weights, losses, batch["mask"], accuracy=correct(logits, targets))


def hidden_and_logits(
    model: Model, batch: Batch, all_tokens: bool = False
) -> tuple[Float[Array, "B T D"], Float[Array, "B M V"] | Float[Array, "B T V"]]:
    """Return the last hidden states, and the logits of the masked tokens or of all tokens."""
    hidden = model.encode(batch["tokens"], mask=batch["tokens_mask"])
    outputs: Any = model.apply_head(hidden, None if all_tokens else batch["masked_positions"])
    return hidden, outputs[0] if isinstance(outputs, tuple) else outputs


@TASKS.register("sentence_pair_pretraining")
@dataclass(frozen=True)
class SentencePairPretraining(MaskedLM):
    """Masked language modeling of a pair of texts, and classification of the pair.

    Attributes:
        pairing: "next_sentence": whether the second text follows the first (BERT, arXiv 1810.04805, section 3.1);
            "sentence_order": which of two consecutive texts comes first (ALBERT, arXiv 1909.11942, section 3.1).
    """

    needs = ("pretraining",)
    head = "pretraining"
    special_tokens = ("pad", "cls", "sep", "mask", "end_of_text")
    begins = False  # pairs have tokens around them with any tokenizer
    ends = ("cls", "sep")
    optional_tokens = ()
    inputs = ("tokens", "segments", "tokens_mask")
    arrays = MaskedLM.arrays | {"segments": "int32 B T", "label": "int32 B"}
    stride: ClassVar[int] = 0  # not an option

    pairing: Literal["next_sentence", "sentence_order"] = "next_sentence"

    def texts(self, content: Mapping[str, Documents]) -> dict[str, Iterable[str]]:
        return {name: Sentences(part) for name, part in content.items()}

    def examples(self, content: Mapping[str, Documents], tokenizer: Tokenizer | None, seed: int) -> Examples:
        length, mask = self.sequence_length, MaskTokens(self.mask_rate, tokenizer, self.whole_words)
        check_length(length, 5, "two texts and three special tokens")
        room = length - encoded.num_added(tokenizer, 2)
        documents = self.texts(content)
        streams = {name: self.encode(part, tokenizer) for name, part in documents.items()}
        splits = {name: Chunks(stream, room) for name, stream in streams.items()}
        order = self.pairing == "sentence_order"
        if not order and any(len(part.stops) == part.stops[0] for part in splits.values()):
            raise ValueError("Next-sentence prediction needs several documents in each split, for negative pairs.")
        pair = PairSentences(room, tokenizer, mask, order)
        return Examples(splits, self.facts(tokenizer), pair, pair)

    def input_examples(self, rows: Sequence[str], tokenizer: Tokenizer, facts: Facts) -> InputExamples:
        return InputExamples(masked_texts(rows, tokenizer, self.sequence_length, joined=True))

    def forward(self, model: Model, batch: Batch) -> Any:
        """Return the logits of all tokens [B, T, V] and of the label [B, 2]."""
        return model(batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])

    def loss(self, model: Model, batch: Batch) -> Result:
        """Return the loss of `masked_lm`, plus the cross-entropy of the `label` [B] of the pair: the sum of both means.

        Both are weighted by the number of masked tokens in the whole batch, of which `batch` may be a part.
        """
        mask, positions, label = batch["tokens_mask"], batch["masked_positions"], batch["label"]
        logits, scores = model(batch["tokens"], segments=batch["segments"], mask=mask, masked_positions=positions)
        masked_loss, weight, aux = token_loss(model, logits, batch, self.label_smoothing)
        pair_loss = Mean.empty().update(cross_entropy(scores, label), mask[:, 0])
        aux["sentence_accuracy"] = Mean.empty().update(correct(scores, label), mask[:, 0])
        whole = model.get_variable("run", "real", {"mask": weight, "examples": pair_loss.weight})
        loss = masked_loss + pair_loss.total * whole["mask"] / jnp.maximum(whole["examples"], 1)
        total = Total((aux["loss"], pair_loss))
        return loss, weight, aux | {"loss": total, "masked_lm_loss": aux["loss"], "sentence_loss": pair_loss}
