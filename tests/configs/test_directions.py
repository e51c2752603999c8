"""Directions of metrics, of the best checkpoint and of a search."""

import pytest

from lineage.configs.directions import higher_is_better
from lineage.configs.paper import bert_glue
from lineage.configs.run import Checkpoint
from lineage.configs.sweeps import Search


@pytest.mark.parametrize(
    ("names", "higher"),
    [
        ("loss masked_lm_loss perplexity bits_per_character cardinality_error mse rmse mae nll wer ter cer", False),
        ("accuracy knn_accuracy exact_match bleu rouge_l f1 entity_f1 recall ap ap_50 spearman pearson auroc", True),
        ("charm map_size capacity tf1x water", None),
    ],
)
def test_directions_by_name(names, higher):
    assert {name: higher_is_better(f"test/{name}") for name in names.split()} == dict.fromkeys(names.split(), higher)


def test_direction_does_not_depend_on_the_split():
    names = ("typing_errors/accuracy", "habits/f1", "accuracy_set/loss", "loss", "accuracy")
    assert [higher_is_better(name) for name in names] == [True, True, False, False, True]
    assert Checkpoint(best="typing_errors/accuracy").highest


@pytest.mark.parametrize("task", bert_glue.TASKS)
def test_best_checkpoint_of_each_task_of_glue(task):
    assert Checkpoint(best=bert_glue.get_config(task).checkpoint.best).highest


def test_direction_of_the_best_checkpoint_and_of_a_search():
    assert Checkpoint(best="test/accuracy").highest
    assert not Checkpoint(best="test/loss").highest
    assert not Checkpoint(best="test/accuracy", best_is_highest=False).highest  # what is stated counts
    with pytest.raises(ValueError, match=r"^checkpoint.best_is_highest is not set: it must be True or False"):
        _ = Checkpoint(best="test/charm").highest
    assert Search({}, metric="test/accuracy").maximize
    assert not Search({}, metric="test/loss").maximize
    assert Search({}, metric="test/charm", highest=True).maximize
    with pytest.raises(ValueError, match=r"^highest of the Search is not set: it must be True or False"):
        Search({}, metric="test/charm")
