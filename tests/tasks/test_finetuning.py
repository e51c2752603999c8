"""Fine-tuning for classification, regression, tagging and question answering; initialization from runs;
distillation.
"""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from lineage.configs import adoption
from lineage.configs.run import Init
from lineage.data.tokenizers import Bytes
from lineage.evaluation.texts import pooled_accuracy
from lineage.models import convert
from lineage.models.bart import BART
from lineage.train import loop
from lineage.train import pretrained as initial
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.preparation import start_notes
from lineage.train.reading import read_variables
from lineage.train.step import TrainState
from tests.data.test_questions import squad
from tests.tiers import tiered
from tests.train.conftest import without_report

pytestmark = pytest.mark.usefixtures("no_report")
MASKED = {"model.width": 16, "source": "stdlib", "source.max_bytes": 20_000, "task.sequence_length": 24}
MASKED |= {"task.name": "masked_lm"}
ONE = {"devices": jax.devices()[:1]}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Write small files for each task and return the options that read them."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [("good nice fine", "yes"), ("bad awful poor", "no"), ("nice fine good", "yes"), ("poor bad", "no")]
    (folder / "labels.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in texts * 2))
    (folder / "numbers.tsv").write_text("".join(f"{'a' * n}\t{n / 4}\n" for n in range(8)))
    words = [("The", "B-NP"), ("cat", "I-NP"), ("sees", "O"), ("her", "B-NP"), ("cat", "I-NP")]
    lines = [f"{i}\t{word}\t_\t{tag}\t_\t_\t_\t_\t_\t_\n" for i, (word, tag) in enumerate(words, 1)]
    (folder / "tags.conllu").write_text("".join([*lines, "\n", *lines[:3], "\n"]))
    contexts = [f"{name} lives in {town}." for name, town in (("Ann", "Rome"), ("Bo", "Paris"), ("Cy", "Bonn"))]
    rows = [("Who?", c, [(0, c.split()[0])]) for c in contexts]
    rows += [("Where?", c, [(c.index(" in ") + 4, c.split()[-1][:-1])]) for c in contexts]
    squad(folder / "squad.json", [*rows, ("Why?", contexts[0], [])])
    of = {
        "text_classification": ("labels", "labels.tsv", 2),
        "text_regression": ("labels", "numbers.tsv", 1),
        "token_classification": ("conllu", "tags.conllu", 3),
        "question_answering": ("squad", "squad.json", 2),
    }
    return {
        name: {
            "task.name": name,
            "source": f"{kind}:{folder}/{file}",
            "source.validation_path": f"{folder}/{file}",
            "tokenizer": "words" if name == "question_answering" else "bytes",
            "task.sequence_length": 24,
            "model.num_classes": classes,
            "model.dropout": 0.0,
        }
        for name, (kind, file, classes) in of.items()
    }


@pytest.fixture(scope="module")
def pretrained(tiny, tmp_path_factory):
    """Train a BERT for a few steps of masked language modeling and return its workdir."""
    workdir = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        loop.train(tiny("bert", MASKED | {"total_steps": 2}), workdir, **ONE)
    return workdir


def learned(tiny, changes, workdir, steps=60):
    config = tiny("bert", changes | {"total_steps": steps, "evaluate_every_steps": steps, "save_every_steps": steps})
    return loop.train(config, workdir, **ONE)


@pytest.mark.thorough
def test_classification_is_learned(tasks, tiny, tmp_path):
    actual = learned(tiny, tasks["text_classification"], tmp_path)
    assert {actual[f"validation/{name}"] for name in ("accuracy", "f1", "matthews")} == {1.0}


@pytest.mark.slow
def test_regression_is_learned(tasks, tiny, tmp_path):
    actual = learned(tiny, tasks["text_regression"], tmp_path, 150)
    assert actual["validation/pearson"] > 0.9
    assert actual["validation/spearman"] > 0.9
    with pytest.raises(ValueError, match=r"model\.num_classes is 3: it must be 1 for a regression\."):
        learned(tiny, tasks["text_regression"] | {"model.num_classes": 3}, tmp_path / "b", 1)


@pytest.mark.slow
def test_tagging_is_learned(tasks, tiny, tmp_path):
    actual = learned(tiny, tasks["token_classification"], tmp_path)
    assert {actual[f"validation/{name}"] for name in ("accuracy", "precision", "recall", "f1")} == {1.0}


@pytest.mark.slow
def test_question_answering_is_learned(tasks, tiny, tmp_path):
    """Check that a small data set with unanswerable questions is memorized, measured on the texts of the answers."""
    changes = tasks["question_answering"] | {"model.width": 32, "schedule.learning_rate": 3e-3}
    actual = learned(tiny, changes, tmp_path, 250)
    assert actual["validation/accuracy"] == 1.0
    assert actual["validation/exact_match"] == 1.0
    assert actual["validation/f1"] == 1.0


def test_another_order_of_the_classes_is_noted(tasks, tiny, tmp_path):
    config = tiny("bert", tasks["text_classification"])
    Experiment(config, **ONE).tokenizer.save(tmp_path)
    config.init.path = str(tmp_path)
    for names, noted in ((("YES", "NO"), True), (("no", "yes"), False), (("bad", "good"), False)):
        (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(names))}))
        notes = " ".join(start_notes(Experiment(config, **ONE), 0, {}))
        assert (f"classes is no, yes, in {tmp_path} it is YES, NO: the classifier is loaded as it is" in notes) == noted


@tiered(
    "task",
    ["token_classification", "text_classification", "question_answering", "text_regression"],
    slow=lambda task: task == "text_regression",
)
def test_padding_does_not_change_loss_and_gradient(task, tasks, tiny):
    """Compare loss, weight and gradient with those of shorter sequences."""
    experiment = Experiment(tiny("bert", tasks[task]), **ONE)
    batch = experiment.data.splits["validation"][0]
    size = batch["tokens_mask"].sum(1).max()
    assert size < 24
    cut = {name: value[:, :size] if value.ndim > 1 else value for name, value in batch.items()}
    params = jax.jit(experiment.make_state)().params

    @jax.jit
    def loss(params, batch):
        total, weight, _ = experiment.task.loss(experiment.model.bind({"params": params}), batch)
        return total, weight

    grad = jax.grad(lambda *args: loss(*args)[0])
    np.testing.assert_allclose(loss(params, batch), loss(params, cut), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grad(params, batch)), jax.tree.leaves(grad(params, cut))):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_span_loss_matches_reference(tasks, tiny):
    experiment = Experiment(tiny("bert", tasks["question_answering"]), **ONE)
    batch = {name: jnp.asarray(value) for name, value in experiment.data.splits["validation"][0].items()}
    variables = {"params": jax.jit(experiment.make_state)().params}
    logits = np.asarray(
        experiment.model.apply(variables, batch["tokens"], segments=batch["segments"], mask=batch["tokens_mask"])
    )
    expected = 0
    for row in np.flatnonzero(batch["mask"]):
        real = logits[row, batch["tokens_mask"][row]]
        scores = log_softmax(real, axis=0)
        expected -= (scores[batch["start"][row], 0] + scores[batch["end"][row], 1]) / 2
    loss, weight, _ = experiment.task.loss(experiment.model.bind(variables), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert weight == 7


@pytest.mark.thorough
def test_pooled_accuracy_of_long_texts(tasks, tiny):
    changes = {"task.long_text": "segments", "task.stride": 2, "task.sequence_length": 8}
    experiment = Experiment(tiny("bert", tasks["text_classification"] | changes), **ONE)
    source = experiment.data.splits["validation"].source
    assert source.is_cut
    logits = np.random.default_rng(0).normal(size=(len(source), 2))
    classes, both = np.exp(logits) / np.exp(logits).sum(1, keepdims=True), 1 / (1 + np.exp(-logits))
    for name, binary in itertools.product(("mean", "max"), (False, True)):
        chances, pool, right = both if binary else classes, getattr(np, name), []
        for text in range(8):
            rows = np.flatnonzero(source.origins == text)
            right.append(pool(chances[rows], axis=0).argmax() == source.per_sequence["label"][rows[0]])
        assert pooled_accuracy(logits, source, binary)[f"{name}_pooled_accuracy"] == np.mean(right)
    state = jax.jit(experiment.make_state)()
    assert "validation/max_pooled_accuracy" in experiment.evaluation()(state.variables(average=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.head": "question_answering"},
            "The task 'text_classification' needs a model with the outputs classification: BERT has "
            r"question_answering. Set model\.head='classification'\.",
        ),
        ({"task.cutmix": 0.2}, r"unknown config key 'task\.cutmix'"),
        ({"teacher": "x"}, "teacher is 'x': it must be empty for the task 'text_classification'"),
        ({"model.num_classes": 1}, r"model\.num_classes is 1: it must be at least 2, as the source 'labels' has"),
    ],
)
def test_invalid_options_raise(changes, message, tasks, tiny, tmp_path):
    with pytest.raises(ValueError, match=message):
        learned(tiny, tasks["text_classification"] | changes, tmp_path, 1)


@pytest.mark.thorough
def test_run_is_initialized_from_another(pretrained, tasks, tiny, tmp_path, capsys):
    """Check that initial parameters and tokenizer equal those of the other run, except for `init.skip`."""
    changes = tasks["token_classification"] | {
        "init.path": str(pretrained),
        "tokenizer": "characters",
        "ema_decay": 0.5,
    }
    config = tiny("bert", changes | {"schedule.learning_rate": 0.0, "total_steps": 1, "init.skip": ("mlp_norm",)})
    loop.train(config, tmp_path, **ONE)
    assert (tmp_path / "tokenizer.json").read_text() == (pretrained / "tokenizer.json").read_text()
    output = capsys.readouterr().err
    assert f"starts from {pretrained}; new: classifier, stack; not used: masked_lm, stack" in output
    theirs, ours = read_variables(pretrained)["params"], Experiment(config, tmp_path, **ONE).restore()
    for params in (ours.params, ours.ema):
        np.testing.assert_array_equal(params["embed"]["table"], theirs["embed"]["table"])
        stack, other = params["stack"]["layers"], theirs["stack"]["layers"]
        np.testing.assert_array_equal(stack["attention"]["query"]["kernel"], other["attention"]["query"]["kernel"])
        assert (np.asarray(stack["mlp_norm"]["bias"]) != other["mlp_norm"]["bias"]).any()


@pytest.mark.thorough
def test_options_of_images_that_are_false_are_adopted(tiny, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    theirs = tiny("vit", {"task.squash": False, "task.image_size": 8, "model.image_size": 8})
    (tmp_path / "config.json").write_text(json.dumps(theirs.to_dict()))
    Experiment(theirs, **ONE).facts.save(tmp_path / "facts.json")
    config = tiny("vit", {"task.squash": True, "init.path": str(tmp_path)})
    adoption.adopt(config)
    assert config.task.squash is False
    assert config.task.image_size == 8


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "task", "start"),
    [("t5", "span_corruption", "pad"), ("bart", "denoising", "end_of_text")],
)
def test_decoder_starts_as_in_pretraining(model, task, start, tiny, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    sizes = {"model.name": model, "model.depth": 1, "model.width": 16, "model.num_heads": 2}
    changes = sizes | {"task.name": task, "task.sequence_length": 16, "source.max_bytes": 20_000, "tokenizer": "bytes"}
    experiment = Experiment(tiny("gpt", changes), **ONE)
    (tmp_path / "config.json").write_text(json.dumps(experiment.stored_config))
    experiment.facts.save(tmp_path / "facts.json")
    experiment.tokenizer.save(tmp_path)
    config = tiny("transformer", {"init.path": str(tmp_path)})
    adoption.adopt(config)
    assert (config.model.name, config.task.start_token) == (model, start)


@pytest.mark.thorough
def test_resumed_run_is_not_initialized_again(pretrained, tasks, tiny, tmp_path, monkeypatch):
    changes = tasks["token_classification"] | {"init.path": str(pretrained)}
    config = tiny("bert", changes | {"total_steps": 1})
    loop.train(config, tmp_path, **ONE)
    monkeypatch.setattr(initial, "start_from", lambda *args, **kwargs: pytest.fail("started again"))
    config.total_steps = 2
    loop.train(config, tmp_path, **ONE)


@pytest.mark.parametrize(("head", "is_new"), [("pretraining", True), ("classification", False)])
def test_classifier_of_another_head_is_not_used(head, is_new, tasks, tiny, tmp_path):
    """Check that a classifier of two classes does not start as that of next-sentence prediction."""
    experiment = Experiment(tiny("bert", tasks["text_classification"] | {"model.num_classes": 2}), **ONE)
    state = experiment.state(Checkpoints(tmp_path / "none"))
    model = experiment.model.clone(head=head, num_classes=2)
    variables = model.init(jax.random.key(5), jnp.zeros((1, 3), int))
    convert.save(tmp_path / "bert", model, variables)
    actual, said = initial.start_from(state, experiment.model, Init(str(tmp_path / "bert")))
    assert ("new: classifier;" in said) == is_new
    kernels = (one["classifier"]["kernel"] for one in (variables["params"], actual.params))
    assert np.array_equal(*kernels) != is_new


def test_initialization_from_a_hugging_face_folder(tasks, tiny, tmp_path):
    config = tiny("bert", tasks["text_classification"])
    experiment = Experiment(config, **ONE)
    state = experiment.state(Checkpoints(tmp_path / "none"))
    model = experiment.model.clone(head="pretraining", num_classes=2)
    variables = model.init(jax.random.key(5), jnp.zeros((1, 3), int))
    convert.save(tmp_path / "bert", model, variables)
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "bert" / "config.json").read_text()) | {"architectures": ["BertModel"]})
    )
    actual, said = initial.start_from(
        state, experiment.model, Init(str(tmp_path / "bert"), ("classifier",), layers=(1, 0))
    )
    assert said.endswith("new: classifier; not used: nothing")
    layers = actual.params["stack"]["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(layers, variables["params"]["stack"]["layers"]["mlp"]["up"]["kernel"][::-1])
    np.testing.assert_array_equal(actual.params["pooler"]["kernel"], variables["params"]["pooler"]["kernel"])
    np.testing.assert_array_equal(actual.params["classifier"]["kernel"], state.params["classifier"]["kernel"])


def test_layers_of_the_smallest_stack(tmp_path):
    """Check that layers that one of two stacks does not have are refused, unless that stack is not copied."""
    model = BART(depth=1, decoder_depth=3, width=8, num_heads=2, vocab_size=9, max_length=4)
    tokens = jnp.ones((1, 2), int)
    convert.save(tmp_path / "bart", model, model.init(jax.random.key(5), tokens, tokens))
    model = model.clone(decoder_depth=1)
    variables = model.init(jax.random.key(6), tokens, tokens)
    state = TrainState(jnp.int32(0), variables["params"], None, {}, None)
    with pytest.raises(ValueError, match=r"init\.layers is \(2,\): the model in .* has layers 0 to 0 in each stack"):
        initial.start_from(state, model, Init(str(tmp_path / "bart"), layers=(2,)))
    initial.start_from(state, model, Init(str(tmp_path / "bart"), ("^encoder_stack/",), layers=(2,)))
    with pytest.raises(ValueError, match=r"init\.layers is \(2,\): the model in .* has no stacks of layers to copy"):
        initial.start_from(state, model, Init(str(tmp_path / "bart"), ("_stack/",), layers=(2,)))


@pytest.mark.thorough
def test_invalid_initialization_raises(pretrained, tasks, tiny, tmp_path):
    changes = tasks["token_classification"] | {"init.path": str(pretrained)}
    with pytest.raises(ValueError, match=r"than the model \(\d+\): .*embed/table \(261, 16\), here \(261, 32\)"):
        learned(
            tiny, changes | {"model.width": 32, "init.skip": ("norm", "layers", "position", "segment")}, tmp_path, 1
        )
    with pytest.raises(ValueError, match=r"contains none of the parameters of the model: it has embed, embed_norm,"):
        learned(tiny, changes | {"init.skip": (".",)}, tmp_path / "b", 1)
    with pytest.raises(ValueError, match=r"init\.skip has 'head', which matches no parameter; one is '"):
        learned(tiny, changes | {"init.skip": ("embed", "head")}, tmp_path / "e", 1)
    with pytest.raises(FileNotFoundError, match="absent"):
        learned(tiny, changes | {"init.path": "absent"}, tmp_path / "c", 1)
    with pytest.raises(ValueError, match=r"init\.skip has '\[', which is not a regular expression"):
        learned(tiny, changes | {"init.skip": ("[",)}, tmp_path / "d", 1)
    layers = {"init.path": str(pretrained), "init.layers": (0, 7)}
    with pytest.raises(ValueError, match=r"init\.layers is \(0, 7\): the model in .* has layers 0 to"):
        loop.train(tiny("bert", MASKED | layers), tmp_path / "layers", **ONE)


def test_model_that_cannot_perform_the_task_raises(pretrained, tiny):
    changes = {"init.path": str(pretrained), "source": "stdlib", "source.max_bytes": 20_000}
    with pytest.raises(
        ValueError, match=r"has a BERT, which cannot perform the task 'causal_lm': .* set model\.name=gpt"
    ):
        tiny("gpt", changes)
    assert tiny("gpt", changes | {"model.name": "gpt"}).model.name == "gpt"


def test_distillation_with_wrong_number_of_weights_raises(pretrained, tiny):
    config = tiny("bert", distilled(pretrained, {"task.weights": (5.0,)}))
    with pytest.raises(ValueError, match=r"task\.weights is \(5\.0,\): it must have 3, for teacher, masked language"):
        jax.eval_shape(Experiment(config).make_state)


def distilled(pretrained, changes=()):
    return (
        MASKED
        | {"task.name": "masked_lm_distillation", "teacher": str(pretrained), "model.dropout": 0.0}
        | dict(changes)
    )


def test_tokenizer_of_the_teacher_has_the_settings_of_its_folder(pretrained, tiny, tmp_path):
    shutil.copy(pretrained / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    Experiment(tiny("bert", distilled(tmp_path)), **ONE).check()
    other = tiny("bert", distilled(tmp_path, {"tokenizer": f"file:{pretrained}"}))
    with pytest.raises(ValueError, match="tokenizer must be the tokenizer of the teacher"):
        Experiment(other, **ONE).check()


@pytest.mark.parametrize("all_tokens", [True, False])
def test_distillation_loss_matches_reference(pretrained, tiny, all_tokens):
    changes = {"task.temperature": 3.0, "task.weights": (0.5, 0.25, 2.0), "task.all_tokens": all_tokens}
    config = tiny("bert", distilled(pretrained, changes))
    experiment = Experiment(config, **ONE)
    batch = dict(jax.tree.map(jnp.asarray, experiment.data.splits["validation"][0]))
    batch["mask"], batch["tokens_mask"] = batch["mask"].at[0, 0].set(False), batch["tokens_mask"].at[1, 20:].set(False)
    params = jax.jit(experiment.make_state)().params
    told = experiment.with_teacher(batch)

    def says(params):
        args = {"mask": batch["tokens_mask"]}
        inner = experiment.model.clone(head="none")
        kept = {name: value for name, value in params.items() if name != "masked_lm"}
        words = experiment.model.apply({"params": params}, batch["tokens"], **args)
        return np.asarray(inner.apply({"params": kept}, batch["tokens"], **args), float), np.asarray(words, float)

    (hidden, words), (their_hidden, their_words) = (
        says(params),
        says(jax.tree.map(jnp.asarray, read_variables(pretrained)["params"])),
    )
    np.testing.assert_allclose(told["teacher_hidden"], their_hidden, atol=1e-5)
    total, count = 0.0, 0

    def divergence(row, t):
        target = np.exp(log_softmax(their_words[row, t] / 3))
        return (target * (np.log(target) - log_softmax(words[row, t] / 3))).sum() * 9

    for row in np.flatnonzero(batch["mask"].any(axis=1)):  # the other rows are padding
        real = np.asarray(batch["tokens_mask"][row])
        a, b = hidden[row, real], their_hidden[row, real]
        cosine = np.mean(1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))
        every = np.mean([divergence(row, t) for t in np.flatnonzero(real)])
        for m in np.flatnonzero(batch["mask"][row]):
            t = batch["masked_positions"][row, m]
            soft = every if all_tokens else divergence(row, t)
            hard = -log_softmax(words[row, t])[batch["targets"][row, m]]
            total, count = total + 0.5 * soft + 0.25 * hard + 2 * cosine, count + 1
    loss, weight, aux = experiment.task.loss(experiment.model.bind({"params": params}), told)
    assert weight == count
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert set(aux) == {"loss", "accuracy", "soft_loss", "masked_lm_loss", "cosine_loss"}


@pytest.mark.thorough
def test_student_equal_to_its_teacher_has_zero_loss(pretrained, tiny, tmp_path):
    """Check that a student equal to its teacher has zero distillation loss, that the teacher runs without
    dropout, and that it is not checkpointed.
    """
    changes = {"init.path": str(pretrained), "task.weights": (1.0, 0.0, 1.0), "total_steps": 2}
    config = tiny("bert", distilled(pretrained, changes | {"schedule.learning_rate": 0.0}))
    actual = loop.train(config, tmp_path / "run", **ONE)
    assert abs(actual["validation/loss"]) < 1e-5
    assert actual["validation/masked_lm_loss"] > 1
    assert set(Experiment(config, tmp_path / "run", **ONE).restore().params) == set(
        read_variables(pretrained)["params"]
    )


@pytest.mark.slow
def test_student_of_half_the_depth_learns(pretrained, tiny, tmp_path):
    changes = {"init.path": str(pretrained), "init.layers": (1,), "model.name": "distilbert", "model.depth": 1}
    config = tiny(
        "bert", distilled(pretrained, changes | {"model.num_segments": 0, "total_steps": 30, "grad_accum_steps": 2})
    )
    actual = loop.train(config, tmp_path, **ONE)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "train/cosine_loss" in line)
    assert actual["validation/cosine_loss"] < 0.5 * first["train/cosine_loss"]


def test_teacher_with_another_tokenizer_raises(pretrained, tiny, tmp_path):
    Bytes().train([], ("mask", "pad", "sep", "cls", "end_of_text")).save(tmp_path / "own.json")
    config = tiny("bert", distilled(pretrained, {"tokenizer": str(tmp_path / "own.json")}))
    with pytest.raises(ValueError, match=r"tokenizer must be the tokenizer of the teacher, .*tokenizer\.json"):
        loop.train(config, tmp_path / "run", **ONE)


def test_teacher_with_another_width_raises(pretrained, tiny, tmp_path):
    with pytest.raises(ValueError, match=r"model\.width is 32: the teacher's is 16\."):
        loop.train(tiny("bert", distilled(pretrained, {"model.width": 32})), tmp_path, **ONE)
