"""k-NN and linear probes match their definitions, also on the features of a run."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lineage.configs import base, cli, schema
from lineage.data import Images
from lineage.data.sources import shapes
from lineage.evaluation import EVALUATORS
from lineage.evaluation.images import FewShot, LinearProbe, Neighbors
from lineage.train import loop
from lineage.train.experiment import Experiment
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("no_report")
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 4, 300).astype(np.int32)
FEATURES = (RANDOM.normal(size=(4, 8))[LABELS] + 1.5 * RANDOM.normal(size=(300, 8)) + 3).astype(np.float32)
KNOWN, ASKED = (FEATURES[:200], LABELS[:200]), (FEATURES[200:], LABELS[200:])


def test_neighbors_are_weighted_by_cosine_similarity():
    known, asked = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (KNOWN[0], ASKED[0]))
    cosine = asked @ known.T
    votes = np.zeros((100, 4))
    for row, nearest in enumerate(np.argsort(-cosine, axis=1)[:, :7]):
        np.add.at(votes[row], KNOWN[1][nearest], np.exp(cosine[row, nearest] / 0.02))
    np.testing.assert_array_equal(Neighbors(count=7, temperature=0.02).fit(*KNOWN).predict(ASKED[0]), votes.argmax(1))
    nearest = Neighbors(count=1).fit(*KNOWN).predict(ASKED[0])
    sharp = Neighbors(count=7, temperature=1e-9).fit(*KNOWN).predict(ASKED[0])
    np.testing.assert_array_equal(sharp, nearest)  # although exp(-distance / temperature) is 0
    plain = Neighbors(count=7, temperature=1e9).fit(*KNOWN).predict(ASKED[0])
    assert (plain != votes.argmax(1)).any()  # the weights matter
    assert Neighbors(count=20).fit(KNOWN[0][:3], KNOWN[1][:3]).predict(ASKED[0]).shape == (100,)


@pytest.mark.parametrize("shots", [0, 5])
def test_ridge_regression_matches_the_closed_form(shots):
    model = (FewShot(shots=shots) if shots else LinearProbe()).fit(*KNOWN)
    rows = np.concatenate([np.flatnonzero(KNOWN[1] == label)[: shots or None] for label in range(4)])
    x, y = KNOWN[0][rows].astype(np.float64), 2.0 * np.eye(4)[KNOWN[1][rows]] - 1
    mean, std = x.mean(0), x.std(0)
    z, penalty = (x - mean) / std, model[-1].alpha_
    weights = np.linalg.solve(z.T @ z + penalty * np.eye(8), z.T @ (y - y.mean(0)))
    expected = (ASKED[0] - mean) / std @ weights + y.mean(0)
    np.testing.assert_allclose(model.decision_function(ASKED[0]), expected, atol=1e-4)
    # This penalty has the smallest error on held-out examples.
    errors = {}
    for penalty in 4.0 ** np.arange(-4, 9):
        design = np.concatenate([z, np.ones((len(z), 1))], axis=1)
        hat = design @ np.linalg.solve(design.T @ design + penalty * np.diag([1] * 8 + [0]), design.T)
        errors[penalty] = (((y - hat @ y) / (1 - np.diag(hat))[:, None]) ** 2).mean()
    assert model[-1].alpha_ == min(errors, key=errors.get)


def accuracies(probes, training, splits):
    return {
        f"{split}/{probe.metric}_accuracy": float(probe.fit(*training).score(*seen))
        for probe in probes
        for split, seen in splits.items()
    }


def test_metric_names():
    probes = [Neighbors(), FewShot(shots=5), FewShot(), LinearProbe()]
    actual = accuracies(probes, KNOWN, {"test": ASKED})
    assert list(actual) == [f"test/{name}_accuracy" for name in ("knn", "5_shot", "10_shot", "linear")]
    right = LinearProbe().fit(*KNOWN).predict(ASKED[0]) == ASKED[1]
    assert actual["test/linear_accuracy"] == pytest.approx(right.mean())
    assert actual["test/linear_accuracy"] > actual["test/5_shot_accuracy"] > 0.3


@pytest.mark.thorough
def test_probes_of_a_run(tiny, tmp_path):
    changes = {"evaluators.knn": "knn", "evaluators.few": "few_shot", "evaluators.few.shots": 5}
    changes |= {"task.augment": "shift(2)", "loader.evaluation_batch_size": 200}
    last = loop.train(tiny("vit", changes | {"total_steps": 4, "evaluate_every_steps": 4}), tmp_path)
    experiment = Experiment(tiny("vit", changes | {"total_steps": 4}), tmp_path)
    state, data = experiment.restore(), experiment.data
    params = {name: value for name, value in state.params.items() if name != "classifier"}
    features = jax.jit(lambda image: experiment.model.clone(num_classes=0).apply({"params": params}, image))

    def seen(source):
        examples = source.take(np.arange(len(source)))
        pixels = examples["image"] / np.float32(127.5) - 1  # not augmented, as in an evaluation
        return np.asarray(features(pixels)), examples["label"]

    training, test = seen(data.train.source), seen(data.splits["test"].source)
    expected = accuracies([Neighbors(), FewShot(shots=5)], training, {"test": test})
    assert {key: last[key] for key in expected} == pytest.approx(expected, abs=2 / 359)
    assert expected["test/knn_accuracy"] > 0.3
    assert "test/accuracy" in last


def test_invalid_probes_raise(tiny):
    with pytest.raises(ValueError, match=r"Unknown evaluator 'knm'\. Did you mean 'knn'"):
        tiny("vit", {"evaluators.features": "knm"})
    options = (("knn", "count", "1 or more"), ("knn", "temperature", "above 0"), ("few_shot", "shots", "1 or more"))
    for name, key, allowed in options:
        with pytest.raises(ValueError, match=rf"evaluators\.{name}\.{key} is 0.*: it must be {allowed}"):
            schema.build(EVALUATORS, schema.section(EVALUATORS, name, **{key: 0}))
    with pytest.raises(ValueError, match="'causal_lm' has no features: probes need a task of labeled images"):
        Experiment(tiny("gpt", {"evaluators.knn": "knn"})).evaluation()
    with pytest.raises(ValueError, match=r"evaluators\.knn\.split is 'tests', but the data's splits are test\."):
        Experiment(tiny("vit", {"evaluators.knn": "knn", "evaluators.knn.split": "tests"})).evaluation()


DETECTION = {"source": "shapes", "source.image_size": 16, "task.name": "object_detection", "task.image_size": 16}
DETECTION |= {f"model.{name}": value for name, value in {"decoder_depth": 1, "num_queries": 8, "mlp_dim": 16}.items()}
DETECTION |= {"task.max_boxes": 8}
DETECTION |= {f"model.backbone.{name}": value for name, value in {"depths": (1,), "widths": (8,)}.items()}
REGRESSION = {"task.name": "text_regression", "task.sequence_length": 8, "tokenizer": "bytes"}


@tiered("model", ["vit", "bert", "detr"], first=2)
def test_outputs_that_are_not_finite(model, tiny, tmp_path, monkeypatch):
    """Check that a model whose parameters have diverged is evaluated, so that the run goes on to its own error."""
    (tmp_path / "numbers.tsv").write_text("a\t0.5\nb\t1\n" * 4)
    file = f"{tmp_path}/numbers.tsv"
    changes = {"vit": {"evaluators.knn": "knn"}, "detr": DETECTION}
    changes["bert"] = {"source": f"labels:{file}", "source.validation_path": file} | REGRESSION
    monkeypatch.setattr(shapes, "SIZES", {"train": 8, "validation": 4})
    experiment = Experiment(tiny(model, changes[model]), devices=jax.devices()[:1])
    variables = jax.tree.map(lambda leaf: leaf * np.nan, jax.jit(experiment.make_state)().variables())
    metrics = experiment.evaluation()(variables)
    expected = {"vit": ["test/knn_accuracy"], "detr": ["validation/ap", "validation/ap_50", "validation/ap_75"]}
    expected["bert"] = ["validation/pearson", "validation/spearman", "validation/mse"]
    assert all(np.isnan(metrics[name]) for name in expected[model])


def test_an_evaluator_has_its_own_interval_and_source(tiny, tmp_path):
    (tmp_path / "other.txt").write_text("def f(x):\n    return x\n" * 40)
    changes = {"evaluators.other": "loss", "evaluators.other.source": f"text:{tmp_path}/other.txt"}
    config = tiny("gpt", changes | {"evaluators.other.every": 2, "evaluators.loss.split": "validation"})
    experiment = Experiment(config, devices=jax.devices()[:1])
    evaluation, variables = experiment.evaluation(), jax.jit(experiment.make_state)().variables()
    names = {"loss", "accuracy", "perplexity", "bits_per_character", "bits_per_byte"}
    assert set(evaluation(variables, 1)) == {f"validation/{name}" for name in names}
    assert set(evaluation(variables, 2)) == {f"{split}/{name}" for name in names for split in ("validation", "other")}
    assert set(evaluation(variables)) == set(evaluation(variables, 4))
    with pytest.raises(
        ValueError, match=r"^evaluators\.other\.split is 'tests', but text:.*'s splits are validation\.$"
    ):
        Experiment(tiny("gpt", changes | {"evaluators.other.split": "tests"})).evaluation()


def test_classes_of_another_source_have_the_indices_of_the_run(tiny):
    names, error = ["cat", "dog", "owl"], r"^The classes must be the same, in the same order: class . of the source is"
    for same in (names, names[:2]):
        Images({}, same).check_classes(names)
    Images({}, names).check_classes(())  # of a model folder without class names
    for other in (["dog", "cat", "owl"], ["cat", "owl"], [*names, "ant"], ["ant", "bee"]):
        with pytest.raises(ValueError, match=error):
            Images({}, other).check_classes(names)
    with pytest.warns(UserWarning, match="matched by their order: class 0 of the source is '0', but 'cat' in the"):
        Images({}, ["0", "1", "2"]).check_classes(names)
    experiment = Experiment(tiny("vit", {}), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=error):
        experiment.read(experiment.source, replace(experiment.facts, class_names=experiment.facts.class_names[::-1]))


def test_another_source_has_the_tokens_and_classes_of_the_run(tmp_path):
    for name, rows in {"own": ("w A", "v B", "u C"), "other": ("u C", "x B")}.items():
        for split in ("train", "test"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / split).write_text("\n".join(rows))
    config = base.get_config("bert", "token_classification", f"bio:{tmp_path}/own")
    changes = {"evaluators.other": "tagging", "evaluators.other.source": f"bio:{tmp_path}/other"}
    cli.override(config, changes | {"tokenizer.name": "words", "task.sequence_length": 8})
    experiment = Experiment(config, devices=jax.devices()[:1])
    splits = {name: split for name, _, split in experiment.evaluation()._enabled()}
    validation, other = splits["loss"], splits["other"]
    assert validation.facts.class_names == other.facts.class_names == ("A", "B", "C")
    known = dict(zip("wvux", experiment.tokenizer.encode("w v u x"), strict=True))
    for split, words, tags in ((validation, "wvu", "ABC"), (other, "ux", "CB")):
        batch = split.batches[0]
        assert batch["tokens"][0, 1 : len(words) + 1].tolist() == [known[word] for word in words]
        assert batch["targets"][batch["mask"]].tolist() == ["ABC".index(tag) for tag in tags]
