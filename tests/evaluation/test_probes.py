"""k-NN and linear probes: as the papers define them, on a run's features."""

import jax
import numpy as np
import pytest

from lineage.data.transforms.calls import parse_calls
from lineage.evaluation.probes import PROBES, Neighbours, Regression, accuracies
from lineage.train import loop
from lineage.train.experiment import Experiment

pytestmark = pytest.mark.usefixtures("no_report")
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 4, 300).astype(np.int32)
FEATURES = (RANDOM.normal(size=(4, 8))[LABELS] + 1.5 * RANDOM.normal(size=(300, 8)) + 3).astype(np.float32)
KNOWN, ASKED = (FEATURES[:200], LABELS[:200]), (FEATURES[200:], LABELS[200:])


def test_neighbours_vote_by_their_cosine():
    known, asked = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (KNOWN[0], ASKED[0]))
    cosine = asked @ known.T
    votes = np.zeros((100, 4))
    for row, nearest in enumerate(np.argsort(-cosine, axis=1)[:, :7]):
        np.add.at(votes[row], KNOWN[1][nearest], np.exp(cosine[row, nearest] / 0.02))
    np.testing.assert_array_equal(Neighbours(7, 0.02).fit(*KNOWN).predict(ASKED[0]), votes.argmax(1))
    plain = Neighbours(7, 1e9).fit(*KNOWN).predict(ASKED[0])
    assert (plain != votes.argmax(1)).any()  # the weights matter
    assert Neighbours(20).fit(KNOWN[0][:3], KNOWN[1][:3]).predict(ASKED[0]).shape == (100,)


@pytest.mark.parametrize("shots", [0, 5])
def test_regression_is_the_closed_form(shots):
    model = Regression(shots).fit(*KNOWN)
    rows = np.concatenate([np.flatnonzero(KNOWN[1] == label)[: shots or None] for label in range(4)])
    x, y = KNOWN[0][rows].astype(np.float64), 2.0 * np.eye(4)[KNOWN[1][rows]] - 1
    mean, std = x.mean(0), x.std(0)
    z, penalty = (x - mean) / std, model[-1].alpha_
    weights = np.linalg.solve(z.T @ z + penalty * np.eye(8), z.T @ (y - y.mean(0)))
    expected = (ASKED[0] - mean) / std @ weights + y.mean(0)
    np.testing.assert_allclose(model.decision_function(ASKED[0]), expected, atol=1e-4)
    # Of the penalties, this one errs least on examples that are left out.
    errors = {}
    for penalty in 4.0 ** np.arange(-4, 9):
        design = np.concatenate([z, np.ones((len(z), 1))], axis=1)
        hat = design @ np.linalg.solve(design.T @ design + penalty * np.diag([1] * 8 + [0]), design.T)
        errors[penalty] = (((y - hat @ y) / (1 - np.diag(hat))[:, None]) ** 2).mean()
    assert model[-1].alpha_ == min(errors, key=errors.get)


def test_names_and_arguments():
    probes = parse_calls("probes", "knn | few_shot(5) | few_shot | linear", PROBES)
    assert probes == [Neighbours(20, 0.07), Regression(5), Regression(10), Regression(0)]
    found = accuracies(probes, KNOWN, {"test": ASKED})
    assert list(found) == [f"test/{name}_accuracy" for name in ("knn", "5_shot", "10_shot", "linear")]
    right = Regression().fit(*KNOWN).predict(ASKED[0]) == ASKED[1]
    assert found["test/linear_accuracy"] == pytest.approx(right.mean())
    assert found["test/linear_accuracy"] > found["test/5_shot_accuracy"] > 0.3


def test_a_run_is_probed(tiny, tmp_path):
    changes = {"probes": "knn | few_shot(5)", "task.augment": "shift(2)", "loader.evaluation_batch_size": 200}
    last = loop.train(tiny("vit", changes | {"total_steps": 4, "evaluate_every_steps": 4}), tmp_path)
    experiment = Experiment(tiny("vit", changes | {"total_steps": 4}), tmp_path)
    state, data = experiment.restore(), experiment.data
    params = {name: value for name, value in state.params.items() if name != "classifier"}
    features = jax.jit(lambda image: experiment.model.clone(num_classes=0).apply({"params": params}, image))

    def seen(source):
        pixels = source.features["image"] / np.float32(127.5) - 1  # not shifted: as in an evaluation
        return np.asarray(features(pixels)), source.features["label"]

    training, test = seen(data.train.source), seen(data.splits["test"].source)
    expected = accuracies([Neighbours(), Regression(5)], training, {"test": test})
    assert {key: last[key] for key in expected} == pytest.approx(expected, abs=2 / 359)
    assert expected["test/knn_accuracy"] > 0.3
    assert "test/accuracy" in last


def test_errors(tiny):
    with pytest.raises(
        ValueError, match=r"probes='knm': 'knm' is not one of knn\(count, temperature\), few_shot\(shots\)"
    ):
        Evaluator(Experiment(tiny("vit", {"probes": "knm"})))
    for probe in ("knn(0)", "knn(5, 0.0)", "few_shot(0)"):  # not after hours of training
        with pytest.raises(ValueError, match=f"{probe.partition('(')[0]} needs 1"):
            parse_calls("probes", probe, PROBES)
    with pytest.raises(ValueError, match="probes is 'knn': they are for models of labelled images"):
        Evaluator(Experiment(tiny("gpt", {"probes": "knn"})))
