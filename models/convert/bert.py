"""BERT: `BertForPreTraining`, `BertForMaskedLM`... <-> `BERT` with the head of the same task.

The families of its descendants are subclasses of `Bert`, see `bert_descendants`.
"""

import typing

import numpy as np

from lineage.models import MODELS
from lineage.models.bert import OUTPUTS, POOLED, WORDS
from lineage.models.convert.family import ENCODER, Family, Rule, block, labels, linear, norm, num_labels, register

SEGMENTS = 2  # number of segments in the file of a model without segments
# Suffix of a class in `transformers` -> our heads; the first one that the model has is used.
HEADS = {
    "ForPreTraining": ("pretraining", "replaced"),
    "ForMaskedLM": ("masked_lm",),
    "ForNextSentencePrediction": ("next_sentence",),
    "ForSequenceClassification": ("classification",),
    "ForTokenClassification": ("token_classification",),
    "ForQuestionAnswering": ("question_answering",),
    "ForMultipleChoice": ("choice",),
    "Model": ("pooler", "none"),
}


@register("bert")
class Bert(Family):
    """Family of an encoder with the heads of BERT; `body` is the prefix of the tensors of the encoder.

    The tensors of the masked-language-model head, `predictions`, are those of its dense layer, its LayerNorm, its
    output projection, which is tied to the word embeddings, and the bias of this projection. A text classifier of
    `two_layers` is our pooler and classifier: the reference has dropout before both, ours before the classifier.
    """

    model = body = "bert"
    name = "Bert"  # prefix of the names of the classes in `transformers`
    fields = {
        "vocab_size": ("vocab_size", 30_522),
        "max_position_embeddings": ("max_length", 512),
        "type_vocab_size": ("num_segments", 2),
        **ENCODER,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), ("dropout", 0.1)),
    }
    fixed = {"tie_word_embeddings": True, "position_embedding_type": "absolute"}
    fixed |= {"is_decoder": False, "add_cross_attention": False}
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    pooler = "bert.pooler.dense"
    predictions = tuple(f"cls.predictions.{x}" for x in ("transform.dense", "transform.LayerNorm", "decoder", "bias"))
    second = "cls.seq_relationship"  # classifier of pairs of segments; "": none
    two_layers = False
    classifiers = {"question_answering": "qa_outputs"}  # head -> tensor of its classifier, if not "classifier"
    dropout = "classifier_dropout", None  # field of the rate before a classifier; None: the rate of the other layers

    @property
    def prefix(self):
        return f"{self.body}."

    @property
    def architectures(self) -> dict[str, str]:
        """Our head for each name of a class in `transformers`."""
        ours = typing.get_args(typing.get_type_hints(MODELS[self.model])["head"])
        known = {name: [head for head in heads if head in ours] for name, heads in HEADS.items()}
        return {f"{self.name}{name}": heads[0] for name, heads in known.items() if heads}

    @property
    def tied(self):
        words, (*_, decoder, bias) = f"{self.body}.embeddings.word_embeddings.weight", self.predictions
        pairs = (f"{decoder}.weight", words), (f"{decoder}.bias", bias)
        return tuple(pair for pair in pairs if pair[0] != bias)

    def rules(self, model):
        """Return the rules of the layers, the pooler and the heads of a model."""
        rules, (dense, after, _, bias) = self.layers(model), self.predictions
        if model.head in POOLED:
            rules += linear("classifier.dense" if self._has_two_layers(model) else self.pooler, "pooler")
        if model.head in WORDS:
            rules += linear(dense, "masked_lm/dense") + norm(after, "masked_lm/norm") + [Rule(bias, "masked_lm/bias")]
        if OUTPUTS.get(model.head, model.num_classes):
            name = self.classifiers.get(model.head, "classifier")
            if model.head in ("pretraining", "next_sentence"):
                name = self.second
            elif self._has_two_layers(model):
                name = "classifier.out_proj"
            rules += linear(name, "classifier")
        return rules

    def layers(self, model) -> list[Rule]:
        """Return the rules of the embeddings and of the layers."""
        return self.embeddings(model) + block(
            f"{self.body}.encoder.layer.*.",
            "stack/layers",
            attended=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
            mlp=("intermediate.dense", "output.dense"),
            norms=("attention.output.LayerNorm", "output.LayerNorm"),
        )

    def embeddings(self, model) -> list[Rule]:
        """Return the rules of the embeddings and of their LayerNorm."""
        tables = {"word": "embed", "position": "position"}
        if model.num_segments:
            tables["token_type"] = "segment"
        start = f"{self.body}.embeddings"
        rules = [Rule(f"{start}.{name}_embeddings.weight", f"{ours}/table") for name, ours in tables.items()]
        return rules + norm(f"{start}.LayerNorm", "embed_norm")

    def value(self, model, setting):
        value = super().value(model, setting)
        return value or SEGMENTS if setting == "num_segments" else value

    def constants(self, model):
        """Return zeros as the segment embeddings of a model without segments."""
        if model.num_segments or "type_vocab_size" not in self.fields:
            return {}
        shape = SEGMENTS, model.embed_width or model.width
        return {f"{self.body}.embeddings.token_type_embeddings.weight": np.zeros(shape, np.float32)}

    def _has_two_layers(self, model):
        return self.two_layers and model.head == "classification"

    def settings(self, config, architecture, names):
        """Return the settings of the head.

        Published files may have both heads of pre-training whatever their class; the tensor `second` shows this. An
        encoder without a pooler has the head "none".
        """
        head = self.architectures[architecture]
        if head == "masked_lm" and f"{self.second}.weight" in names:
            head = "pretraining"
        if head == "pooler" and not any("pooler" in name for name in names):
            head = "none"
        settings = {"head": head, "head_dropout": config.get(*self.dropout)}
        return settings if head in OUTPUTS else settings | {"num_classes": num_labels(config, architecture)}

    def settings_for(self, target, settings, names):
        """Return the head "pooler" for a target that needs the pooler of a file whose class ignores it."""
        needed = isinstance(target, MODELS[self.model]) and target.head in POOLED and not self._has_two_layers(target)
        is_ignored = settings["head"] == "masked_lm" and any(".pooler." in name for name in names)
        return {"head": "pooler"} if needed and is_ignored and target.head not in WORDS else {}

    def config(self, model):
        """Return the class of a model in `transformers`, and its labels."""
        names = {head: name for name, head in self.architectures.items()} | {"none": f"{self.name}Model"}
        if model.head not in names:
            raise ValueError(f"head is {model.head!r}: it must be one of {', '.join(names)} for `transformers`.")
        field, default = self.dropout
        inherited = default is not None and model.head_dropout is None
        config = {"architectures": [names[model.head]], field: model.dropout if inherited else model.head_dropout}
        return config if model.head in OUTPUTS else config | labels(model)

    def ignored(self, model):
        """Return the expression of ignored tensors: unused heads and poolers, and positions in old files."""
        patterns = [r".*\.position_ids"]
        if model.head not in POOLED or self._has_two_layers(model):
            prefixed = self.pooler.startswith(self.prefix)
            patterns.append(rf"({self.body}\.)?pooler" if prefixed else self.pooler.partition(".")[0])
        if model.head in ("none", "pooler"):
            names = *self.predictions, self.second, *self.classifiers.values(), "classifier"
            patterns += [name.partition(".")[0] for name in names if name]
        return "|".join(rf"{pattern}(\..*)?" for pattern in patterns)
