"""Mistakes in classes of one's own end with a sentence that names the class."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import pytest

from lineage.configs import base
from lineage.data.tokenizers import TOKENIZERS, TokenizerKind
from lineage.evaluation import EVALUATORS, Evaluator
from lineage.models import MODELS, Model
from lineage.tasks import TASKS
from lineage.tasks.image_classification import ImageClassification
from lineage.tasks.images import LabeledImageTask
from lineage.train import loop
from lineage.train.experiment import Experiment
from lineage.train.optimizer import OPTIMIZERS, SCHEDULES, Optimizer
from lineage.train.optimizer.base import Setting
from lineage.train.optimizer.schedules import Schedule


class Own(Model):
    """Linear classifier.

    Attributes:
        channels: number of channels of the images.
    """

    channels: int = 1
    outputs = ("classes",)

    @nn.compact
    def __call__(self, image):
        return nn.Dense(10)(image.reshape(image.shape[0], -1))


class WithClasses(Own):
    """Linear classifier with a number of classes."""

    num_classes: int = 10


def method(self):
    return ()


CLASSES = [
    (MODELS, Model, {"outputs": method}, "outputs, which must be an attribute or a property, not a method"),
    (MODELS, Model, {"layer_groups": method}, "layer_groups, which must be an attribute or a property, not a method"),
    (MODELS, Model, {"sharding_rules": method}, "sharding_rules, which must be an attribute or a property, not"),
    (MODELS, Model, {"outputs": "classes"}, "outputs 'classes', which must be a tuple, such as ('classes',)"),
    (MODELS, Model, {"FROM_DATA": "channels"}, "FROM_DATA 'channels', which must be a tuple, such as ('channels',)"),
    (TASKS, LabeledImageTask, {"arrays": method}, "arrays, which must be an attribute or a property, not a method"),
    (TASKS, LabeledImageTask, {"needs": "patches"}, "needs 'patches', which must be a tuple, such as ('patches',)"),
    (TASKS, LabeledImageTask, {"evaluators": "loss"}, "evaluators 'loss', which must be a tuple, such as ('loss',)"),
    (TASKS, LabeledImageTask, {"loss": property(method)}, "loss, which must be a method, not a property"),
    (EVALUATORS, Evaluator, {"measure": cached_property(method)}, "measure, which must be a method, not a property"),
    (EVALUATORS, Evaluator, {"returns": "error"}, "returns 'error', which must be a tuple, such as ('error',)"),
]


@pytest.mark.parametrize(("registry", "parent", "members", "wrong"), CLASSES)
def test_members_of_another_kind_than_in_the_base_class_are_refused(registry, parent, members, wrong):
    needed = {"needs": ("patches",), "loss": lambda self, model, batch: None} if registry is TASKS else {}
    needed |= {"measure": lambda self, context, variables, split: {}} if registry is EVALUATORS else {}
    cls = type(parent)("Mine", (parent,), {"__module__": __name__} | needed | members)
    if parent is not Model:
        cls = dataclass(frozen=True)(cls)
    with pytest.raises(ValueError, match=f"^The {registry.kind} Mine has {re.escape(wrong)}"):
        registry.register("mine")(cls)
    assert "mine" not in registry


def test_variants_must_have_fields():
    class Variants(Model):
        """Model with a misspelled key.

        Attributes:
            size: number.
        """

        size: int = 1
        VARIANTS: ClassVar = {"S": {"size": 1}, "B": {"sise": 2}}

    with pytest.raises(ValueError, match="Variants: VARIANTS has 'sise', which is not a field: did you mean 'size'"):
        MODELS.register("variants")(Variants)


def test_models_may_replace_properties_by_fields_and_attributes():
    class Fields(Model):
        outputs: tuple[str, ...] = ("classes",)
        layer_groups = ()
        VARIANTS: ClassVar = {"S": {"outputs": ("features",)}}

    MODELS.register("own_fields")(Fields)
    assert MODELS.pop("own_fields") is Fields


def config_of(monkeypatch, model, task, **attributes):
    monkeypatch.setitem(MODELS, "own", model)
    members = {"__module__": __name__, "__doc__": ImageClassification.__doc__} | attributes
    monkeypatch.setitem(TASKS, "own", dataclass(frozen=True)(type("OwnTask", (task,), members)))
    config = base.get_config("own", "own", "digits")
    config.loader.batch_size = 8
    config.total_steps = 1
    return config


def test_classifier_of_images_without_num_classes_is_refused(monkeypatch, tmp_path):
    """The loss needs it for labels that are probabilities."""
    config = config_of(monkeypatch, Own, ImageClassification)
    with pytest.raises(ValueError, match=r"^The model Own has no field num_classes, which 'own' needs\.$"):
        loop.train(config, tmp_path)


def test_outputs_that_a_property_returns_as_a_text_are_refused(monkeypatch, tmp_path):
    wrong = type("Wrong", (WithClasses,), {"__module__": __name__, "outputs": property(lambda self: "classes")})
    config = config_of(monkeypatch, wrong, ImageClassification)
    with pytest.raises(ValueError, match=r"^The model Wrong has outputs 'classes', which must be a tuple, such as"):
        Experiment(config, tmp_path).check()


ARRAYS = ImageClassification.arrays


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": "float32 B hight width channels"}, r"has the axis 'hight' of image, .*: did you mean 'height'\?"),
        ({"image": "float33 B height width channels"}, "has the dtype 'float33' of image, which does not exist"),
        ({"image": ["float32", "B"]}, r"has \['float32', 'B'\] as image: it must be a string such as 'int32 B T'\."),
    ],
)
def test_arrays_that_are_not_a_dtype_and_axes_are_refused(monkeypatch, tmp_path, arrays, message):
    config = config_of(monkeypatch, WithClasses, ImageClassification, arrays=ARRAYS | arrays)
    with pytest.raises(ValueError, match=rf"^The task OwnTask {message}"):
        loop.train(config, tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (ARRAYS | {"other": "float32 B"}, "have no other, which the `arrays` of OwnTask have"),
        ({name: ARRAYS[name] for name in ("image", "mask")}, "have label, which the `arrays` of OwnTask lack"),
        (ARRAYS | {"label": "float32 B"}, "have label as int32 [8], but the `arrays` of OwnTask as float32 [8]"),
    ],
)
def test_batches_that_do_not_fit_the_arrays_are_refused(monkeypatch, tmp_path, arrays, message):
    loss = ImageClassification.loss

    def reading(self, model, batch):
        label = jnp.zeros(8, jnp.int32)
        return loss(self, model, {**batch, "label": label})

    config = config_of(monkeypatch, WithClasses, ImageClassification, arrays=arrays, loss=reading)
    with pytest.raises(ValueError, match=f"^The training batches {re.escape(message)}"):
        loop.train(config, tmp_path)


@pytest.mark.parametrize("returned", [None, {"train": []}])
def test_examples_of_another_type_are_refused(monkeypatch, tmp_path, returned):
    config = config_of(monkeypatch, WithClasses, ImageClassification, examples=lambda self, *_: returned)
    kind = type(returned).__name__
    with pytest.raises(ValueError, match=rf"^The method examples of OwnTask returns a {kind}: it must be Examples\.$"):
        loop.train(config, tmp_path)


def of(parent, **members):
    return dataclass(frozen=True)(type("Mine", (parent,), {"__module__": __name__} | members))


def test_schedules_without_decay_are_refused():
    """Their learning rate was constant, for example if the name of the method was misspelled."""
    misspelled = of(Schedule, decays=lambda self, steps, warmup_steps: lambda step: 0.1 / step)
    with pytest.raises(ValueError, match=r"^The schedule Mine must have the method decay or make\.$"):
        misspelled().make(10)
    assert SCHEDULES["constant"]().make(10)(5) == pytest.approx(1e-3)
    changed = of(Schedule, make=lambda self, *options: lambda step: Schedule.make(self, *options)(step) / 2)
    assert changed().make(10)(5) == pytest.approx(5e-4)


@pytest.mark.parametrize("returned", [None, lambda updates, state, params: (updates, state)])
def test_rules_of_another_type_are_refused(returned):
    optimizer = of(Optimizer, rule=lambda self, setting: returned)()
    kind = type(returned).__name__
    with pytest.raises(ValueError, match=rf"^The method rule of Mine returns a {kind}: it must be an optax\.Gradient"):
        optimizer.transforms(Setting(lambda step: 0.1, None, dict))
    assert len(OPTIMIZERS["adamw"]().transforms(Setting(lambda step: 0.1, None, dict))) > 1


def test_tokenizers_without_a_backend_are_refused():
    with pytest.raises(ValueError, match=r"^The tokenizer Mine must have backend, see "):
        TOKENIZERS.register("mine")(of(TokenizerKind))
