"""Names of metrics that evaluators give without computing them."""

import jax.numpy as jnp
import numpy as np
import pytest

from lineage.evaluation import EVALUATORS
from lineage.evaluation.base import Context, Evaluator
from lineage.tasks import TASKS
from lineage.train.experiment import Experiment
from tests.tiers import tiered

CASES = {
    "gpt": {},
    "vit": {"evaluators.knn": "knn", "evaluators.knn.split": "test", "evaluators.few_shot": "few_shot"},
    "transformer": {"source": "pairs:{0}", "source.test_path": "{0}", "evaluators.other": "loss"}
    | {"evaluators.other.source": "pairs:{0}", "evaluators.other.split": "test"},
}


@pytest.mark.thorough
@tiered("model", list(CASES), first=2)
def test_known_names_are_those_of_the_results(model, tiny, tmp_path):
    (path := tmp_path / "pairs.tsv").write_text("1\t2\n3\t4\n")
    changes = {key: value.format(path) for key, value in CASES[model].items()}
    experiment = Experiment(tiny(model, changes))
    evaluation = experiment.evaluation()
    measured = set(evaluation(experiment.variables(experiment.make_state())))
    known = {
        f"{split.label}/{name}"
        for _, evaluator, split in evaluation._enabled()
        for name in evaluator.names(evaluation.context, split)
    }
    assert measured == known
    for metric in known:
        evaluation.check_metric("checkpoint.best", metric)
    with pytest.raises(ValueError, match=r"^checkpoint\.best is 'test/los'"):
        evaluation.check_metric("checkpoint.best", "test/los")


@tiered(
    "changes",
    [
        {"evaluators.knn": "knn", "evaluators.other": "knn", "evaluators.other.count": 5},
        {"evaluators.test": "loss", "evaluators.test.source": "digits"},  # named like the split of the run
    ],
)
def test_two_evaluators_must_not_return_the_same_metric(changes, tiny):
    message = r"^evaluators\.\w+ and evaluators\.\w+ both return test/\w+: give one of them"
    with pytest.raises(ValueError, match=message):
        Experiment(tiny("vit", changes)).evaluation()
    allowed = {"evaluators.other": "knn", "evaluators.other.source": "digits", "evaluators.knn": "knn"}
    Experiment(tiny("vit", allowed | {"evaluators.few_shot": "few_shot", "evaluators.loss.every": 0})).evaluation()


def measured(tiny, monkeypatch, values):
    monkeypatch.setattr(EVALUATORS["knn"], "measure", lambda *_: values)
    monkeypatch.setattr(EVALUATORS["knn"], "names", lambda *_: None)
    experiment = Experiment(tiny("vit", {"evaluators.knn": "knn"}))
    return experiment.evaluation()(experiment.variables(experiment.make_state()))


@tiered(
    "values",
    [
        {"m": np.arange(3.0)},
        {"m": "1.5"},
        {"m": None},
        {"m": 10**400},
        {"m": {"a": 1.0}},
        1.0,
        None,
    ],
    first=3,
)
def test_evaluators_must_return_numbers(values, tiny, monkeypatch):
    with pytest.raises(ValueError, match=r"^evaluators\.knn returns .*: it must (be a number|return a dictionary)"):
        measured(tiny, monkeypatch, values)


def test_numbers_of_evaluators_are_plain_and_belong_to_one_evaluator(tiny, monkeypatch):
    values = {"a": np.bool_(True), "b": np.int64(2), "c": jnp.bfloat16(0.5)}
    metrics = measured(tiny, monkeypatch, values)
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics["test/c"] == 0.5
    with pytest.raises(ValueError, match=r"^evaluators\.\w+ and evaluators\.\w+ both return test/accuracy: give"):
        measured(tiny, monkeypatch, {"accuracy": 1.0})


@pytest.mark.parametrize(
    "name", ["detection", "generation", "pooled_accuracy", "question_answering", "regression", "tagging"]
)
def test_evaluators_of_other_tasks_are_refused(name):
    """Check evaluators that read the predictions or the options of their tasks."""
    fitting = []
    for task, cls in TASKS.items():
        (context := object.__new__(Context)).task = object.__new__(cls)
        if name in cls.evaluators:
            Evaluator.check(EVALUATORS[name](), context)
            fitting.append(task)
        else:
            with pytest.raises(ValueError, match=f"^The evaluator '{name}' does not fit the task '{task}'"):
                EVALUATORS[name]().check(context)
    assert fitting
