"""The `layer_groups` of models of one's own must fit their parameters."""

import flax.linen as nn
import pytest

from lineage.configs import base
from lineage.models import MODELS, Model
from lineage.models.base import Layers
from lineage.train.experiment import Experiment

LAST = {"layer_decay": 0.5}, {"frozen_layers": 1}


class Own(Model):
    """Classifier with residual layers, each with its own parameters, or with the sum of stacked layers.

    Attributes:
        groups: the `layer_groups`.
        depth: number of layers.
        stacked: whether the parameters of the layers are stacked.
        num_classes: number of classes.
        channels: number of channels of the images.
    """

    groups: tuple = ()
    depth: int = 2
    stacked: bool = False
    num_classes: int = 10
    channels: int = 1

    input_parameters = "^embed/"
    outputs = ("classes",)

    @property
    def layer_groups(self):
        return tuple(Layers(*group) for group in self.groups)

    @nn.compact
    def __call__(self, image):
        x = nn.Dense(5, name="embed")(image.reshape(len(image), -1))
        if self.stacked:
            stack = nn.vmap(nn.Dense, {"params": 0}, {"params": True}, in_axes=None, axis_size=self.depth)
            x = stack(5, name="layers")(x).sum(0)
        else:
            for layer in range(self.depth):
                x = x + nn.Dense(5, name=f"layer_{layer}")(x)
        return nn.Dense(self.num_classes, name="head")(x)


def experiment(monkeypatch, tmp_path, groups, stacked, **options):
    monkeypatch.setitem(MODELS, "own", Own)
    config = base.get_config("own", "image_classification", "digits", optimizer="sgd")
    config.model.update(groups=groups, stacked=stacked)
    config.optimizer.update(options)
    config.total_steps = 1
    return Experiment(config, tmp_path)


@pytest.mark.parametrize(
    ("groups", "stacked"),
    [
        ((("layer_0", 1, "encoder", False), ("layer_1", 1, "encoder", False)), False),
        ((("layers", 2),), True),
        ((("layer_0", 1, "encoder", False),), False),  # the other layer counts as a head
        ((("layer_0", 1, "encoder", False), ("other", 0)), False),
    ],
)
@pytest.mark.parametrize("options", [{}, *LAST])
def test_layers_that_fit_the_parameters_are_accepted(monkeypatch, tmp_path, groups, stacked, options):
    assert experiment(monkeypatch, tmp_path, groups, stacked, **options).abstract_state.params


@pytest.mark.parametrize("options", [{}, *LAST])
@pytest.mark.parametrize(
    ("groups", "stacked", "message"),
    [
        ((("layer_0", 1), ("layer_1", 1)), False, r"first axis of layer_0/bias has size 1, but its shape is \(5,\)"),
        ((("layers", 3),), True, r"first axis of layers/bias has size 3, but its shape is \(2, 5\)"),
    ],
)
def test_stacked_layers_of_another_number_are_refused(monkeypatch, tmp_path, groups, stacked, message, options):
    with pytest.raises(ValueError, match=message):
        _ = experiment(monkeypatch, tmp_path, groups, stacked, **options).abstract_state


@pytest.mark.parametrize("groups", [(("layr_0", 1, "encoder", False),), (("layer_0", 1, "encoder", False), ("x", 2))])
def test_layers_without_parameters_are_refused_where_their_order_matters(monkeypatch, tmp_path, groups):
    for options in LAST:
        with pytest.raises(ValueError, match=f"Own has '{groups[-1][0]}', which matches no parameter; one is '"):
            _ = experiment(monkeypatch, tmp_path, groups, False, **options).abstract_state
    assert experiment(monkeypatch, tmp_path, groups, False).abstract_state.params
