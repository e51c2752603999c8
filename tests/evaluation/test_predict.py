"""The command `predict` for texts: its files scored by `score` have the metrics of the run's own evaluation."""

import json
import os
import resource
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax

from lineage.configs import cli
from lineage.data import Loader
from lineage.evaluation.prediction import Output
from lineage.evaluation.sampling import Sampler
from lineage.models.decoding import continuous
from lineage.train.experiment import Experiment
from tests.data.test_questions import CONTEXT, squad
from tests.evaluation.conftest import write_jsonl
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("no_report")
BERT = {"model.dropout": 0.0, "tokenizer": "bytes", "task.sequence_length": 24}
MASKED = {"source": "stdlib", "source.max_bytes": 20_000, "task.sequence_length": 24}


def labeled(tmp_path, count=21):
    """Write labeled texts, two of which are longer than the model; return the path of a .tsv and one of a .jsonl."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcd "), rng.integers(3, 20))).strip() or "a" for _ in range(count)]
    texts[3], texts[9] = ("".join(rng.choice(list("abcd"), 60)) for _ in range(2))
    rows = [{"text": text, "label": str(rng.choice(["no", "yes", "maybe"]))} for text in texts]
    rows[0]["label"], rows[1]["label"], rows[2]["label"] = "no", "yes", "maybe"
    table = tmp_path / "labels.tsv"
    table.write_text("".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    return table, write_jsonl(tmp_path / "labels.jsonl", rows)


def test_classes_of_texts(trained, predict, score, printed, tmp_path):
    """Check the accuracy, other formats of the inputs, and the rule for long texts."""
    table, lines = labeled(tmp_path)
    source = {"source": f"labels:{table}", "source.validation_path": str(table), "task.name": "text_classification"}
    source |= {"task.long_text": "segments", "task.stride": 10}
    folder, metrics = trained("bert", BERT | source | {"model.num_classes": 3}, steps=40)
    actual = predict(folder, lines)
    assert len(actual) == 21
    for row in actual:
        assert set(row["probabilities"]) == {"no", "yes", "maybe"}
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)
    assert np.std([row["probabilities"]["no"] for row in actual]) > 0.01
    assert score("accuracy", "out.jsonl", lines)["accuracy"] == metrics["validation/mean_pooled_accuracy"]
    experiment = Experiment(cli.load(str(folder / "config.json"))[0], folder)
    split = experiment.data.splits["validation"]
    logits = experiment.context().rows(experiment.task.forward, experiment.restore().variables(), split)
    chances = softmax(logits, axis=-1)[split.source.origins == 3]
    assert np.std(chances, axis=0).max() > 0.01
    expected = dict(zip(experiment.data.facts.class_names, chances.mean(axis=0).tolist()))
    assert actual[3]["probabilities"] == pytest.approx(expected, abs=1e-5)

    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "texts.csv").write_text("n,review\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts)))
    others = [(tmp_path / "texts.txt",), (f"labels:{table}",), (tmp_path / "texts.csv", "--columns=review")]
    for number, (inputs, *options) in enumerate(others):
        assert printed(folder, inputs, *options) == actual, number


def test_values_of_texts(trained, predict, score, call, tmp_path):
    """Check the scores of values, of which some are means over the windows of a long text."""
    table = tmp_path / "numbers.tsv"
    table.write_text("".join(f"{'ab' * n}\t{n / 10}\n" for n in range(1, 19)))
    source = {"source": f"labels:{table}", "source.validation_path": str(table), "task.name": "text_regression"}
    folder, _ = trained("bert", BERT | source | {"model.num_classes": 1, "task.long_text": "segments"}, steps=5)
    code, printed, output = call("evaluate", f"--workdir={folder}")
    assert code == 0, output
    metrics = json.loads(printed)
    actual = predict(folder, f"labels:{table}")
    assert len(actual) == 18
    labels = write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "label": n / 10} for n in range(1, 19)])
    scores = score("regression", "out.jsonl", labels)
    assert scores == {name: metrics[f"validation/{name}"] for name in ("pearson", "spearman", "mse")}
    assert 0 < abs(scores["pearson"]) < 1
    values = np.array([row["value"] for row in actual])
    assert scores["mse"] == pytest.approx(((values - np.arange(1, 19) / 10) ** 2).mean(), rel=1e-6)
    assert scores["pearson"] == pytest.approx(np.corrcoef(values, np.arange(18))[0, 1], abs=1e-5)


def test_tags_of_words(trained, predict, score, tmp_path):
    """Check the F1 of sentences, one of which is several sequences, and words in other formats."""
    rng = np.random.default_rng(1)
    tags = [rng.choice(["O", "B-X", "I-X"], size).tolist() for size in (4, 1, 9, 30, 2, 7)]
    words = [["".join(rng.choice(list("abc"), rng.integers(1, 4))) for _ in sentence] for sentence in tags]
    path = tmp_path / "tags.conllu"
    lines = [
        "".join(f"{i}\t{word}\t_\t{tag}\t_\t_\t_\t_\t_\t_\n" for i, (word, tag) in enumerate(zip(*sentence), 1))
        for sentence in zip(words, tags)
    ]
    path.write_text("\n".join(lines) + "\n")
    source = {"source": f"conllu:{path}", "source.validation_path": str(path), "task.name": "token_classification"}
    folder, metrics = trained("bert", BERT | source | {"model.num_classes": 3}, steps=20)
    actual = predict(folder, path)
    assert [row["words"] for row in actual] == words
    assert [len(row["tags"]) for row in actual] == [4, 1, 9, 30, 2, 7]
    scores = score("tagging", "out.jsonl", write_jsonl(tmp_path / "true.jsonl", tags))
    assert scores["f1"] > 0
    for name in ("f1", "precision", "recall", "accuracy"):
        assert scores[name] == metrics[f"validation/{name}"]
    assert score("tagging", "out.jsonl", path) == scores
    (tmp_path / "words.txt").write_text("".join(" ".join(sentence) + "\n" for sentence in words))
    write_jsonl(tmp_path / "words.jsonl", [{"words": sentence} for sentence in words])
    for name in ("words.txt", "words.jsonl"):
        assert predict(folder, tmp_path / name, output=f"out_{name}.jsonl") == actual, name


@tiered("unanswerable", [False, True])
def test_answers_to_questions(unanswerable, trained, predict, score, printed, tmp_path):
    asked = [
        ("Who?", CONTEXT, [(13, "Normans")]),
        ("When?", CONTEXT, [(3, "1066")]),
        ("What?", CONTEXT[:9], [(0, "In")]),
    ]
    path = squad(tmp_path / "squad.json", asked + [("Why?", CONTEXT, [])] * unanswerable)
    options = {"task.name": "question_answering", "tokenizer": "words", "task.sequence_length": 16, "task.stride": 4}
    folder, metrics = trained("bert", BERT | options | {"source": f"squad:{path}", "source.validation_path": path}, 25)
    actual = predict(folder, path, output="out.json")
    scores = score("squad", "out.json", path)
    for name in ("exact_match", "f1"):
        assert scores[name] == metrics[f"validation/{name}"]
    assert scores["f1"] > 0
    assert [row["id"] for row in actual] == list(map(str, range(len(actual))))
    for row in actual:
        best = [answer["score"] for answer in row["n_best"]]
        assert best == sorted(best, reverse=True)
        assert len({answer["text"] for answer in row["n_best"]}) == len(best) > 1
        assert row["prediction"] in ("", row["n_best"][0]["text"])
        assert ("no_answer_score" in row) == unanswerable
    for threshold, empty in ((-1e9, unanswerable), (1e9, False)):
        answers = printed(folder, path, f"--config.task.no_answer_threshold={threshold}")
        assert {row["prediction"] == "" for row in answers} == {empty}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "task"),
    [
        pytest.param("transformer", "sequence_to_sequence", marks=pytest.mark.slow),
        ("gpt", "conditional_lm"),
    ],
)
def test_generated_texts(model, task, trained, predict, score, tmp_path):
    """Check BLEU, and that decoding options change the texts."""
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(["a", "b", "cc", "d"], rng.integers(4, 9))) for _ in range(70)]
    targets = [f"x y x y {row[0]}" for row in rows]
    path = write_jsonl(
        tmp_path / "pairs.jsonl", [{"input": row, "target": target} for row, target in zip(rows, targets)]
    )
    references = write_jsonl(tmp_path / "references.jsonl", targets)
    source = {"source": f"pairs:{path}", "source.validation_path": str(path), "task.name": task, "tokenizer": "bytes"}
    sizes = {"task.sequence_length": 48, "model.max_length": 60, "sampling.max_new_tokens": 12}
    folder, metrics = trained(model, source | sizes | {"sampling.temperature": 0.0}, steps=60)
    actual = predict(folder, path)
    assert len(actual) == 70
    assert score("bleu", "out.jsonl", references)["bleu"] == metrics["validation/bleu"]
    assert metrics["validation/bleu"] > 0
    (tmp_path / "inputs.txt").write_text("".join(f"{row}\n" for row in rows))
    assert predict(folder, tmp_path / "inputs.txt", output="lines.jsonl") == actual
    assert len(predict(folder, path, "--config.sampling.num_beams=3", output="beams.jsonl")) == 70
    short = predict(folder, path, "--config.sampling.max_new_tokens=3", output="short.jsonl")
    assert [entry["prediction"] for entry in short] == [entry["prediction"][:3] for entry in actual]


@pytest.mark.thorough
def test_generation_is_split_over_the_devices(tiny, monkeypatch):
    """Check that each device generates its part of a batch, and that the tokens are those of one device."""
    config = tiny("gpt", {"tokenizer": "bytes", "sampling.temperature": 1.0})
    actual, made, run = {}, [], continuous._run

    def recorded(*args):
        state = run(*args)
        made.append(state[0])
        return state

    monkeypatch.setattr(continuous, "_run", recorded)
    for count in (1, 8):
        experiment = Experiment(config, devices=jax.devices()[:count])
        variables = jax.jit(experiment.make_state, out_shardings=experiment.state_shardings)().variables()
        batches = experiment.context().inputs(
            [chr(97 + number) * (1 + number % 8) for number in range(16)], Loader(batch_size=16)
        )
        actual[count] = list(Sampler(experiment.context()).texts_of(variables, [batches]))
        assert len({str(shard.index) for shard in made[-1].tokens.addressable_shards}) == count
    assert actual[1] == actual[8]
    assert len(set(actual[1])) == 16


@pytest.mark.slow
def test_continued_prompts(trained, call, refused, printed, tmp_path):
    """Check that prompts of different lengths in a batch are continued as one by one."""
    folder, _ = trained("gpt", {"tokenizer": "bytes"})
    prompts = ["import", "d", "def f", "xyz("]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    greedy = "--config.sampling.temperature=0"
    for prompt, actual in zip(prompts, printed(folder, tmp_path / "prompts.txt", greedy)):
        _, text, _ = call("generate", f"--workdir={folder}", f"--prompt={prompt}", greedy)
        assert text == f"{prompt}{actual['prediction']}\n"
    (tmp_path / "prompts.txt").write_text("".join(f"{'ab' * (number % 4)}c\n" for number in range(40)))
    samples = [printed(folder, tmp_path / "prompts.txt", f"--batch-size={size}") for size in (8, 16)]
    assert samples[0] == samples[1]
    assert len({row["prediction"] for row in samples[0]}) > 30
    (tmp_path / "prompts.txt").write_text("import\n\n")
    said = refused(folder, f"--inputs={tmp_path / 'prompts.txt'}")
    assert "error: The text '' has no token: a language model continues at least one." in said
    (tmp_path / "prompts.txt").write_text("b" * 12 + "\n")  # a text of 16 tokens at most
    (actual,) = printed(folder, tmp_path / "prompts.txt", greedy, "--config.sampling.max_new_tokens=9")
    assert [actual] == printed(folder, tmp_path / "prompts.txt", greedy, "--config.sampling.max_new_tokens=4")
    assert [actual] != printed(folder, tmp_path / "prompts.txt", greedy, "--config.sampling.max_new_tokens=3")
    (tmp_path / "prompts.txt").write_text("b\n" * 70 + "b" * 16 + "\n")
    retried = "predict", folder, f"--inputs={tmp_path / 'prompts.txt'}", f"--output={tmp_path / 'out.jsonl'}"
    code, _, said = call(*retried, "--config.sampling.max_new_tokens=9")
    assert code == 1
    assert "error: prompt 70 has 16 tokens: it must have fewer than model.max_length, 16, so that" in said
    said = refused(folder, f"--inputs={tmp_path / 'prompts.txt'}", greedy, "--config.sampling.num_beams=2")
    assert "error: a prompt has 16 tokens and sampling.max_new_tokens is" in said
    (tmp_path / "prompts.txt").write_text("b" * 12 + "\n")
    code, _, said = call(*retried, "--config.sampling.max_new_tokens=2")  # the file is empty
    assert code == 0, said


@pytest.mark.thorough
def test_filled_masks(trained, predict, score, printed, call, tmp_path):
    """Check tokens and probabilities against the model."""
    folder, _ = trained("bert", MASKED | {"task.name": "masked_lm", "model.dropout": 0.0})
    (tmp_path / "masked.txt").write_text("def <mask>oo(<mask>)\nno mask\n")
    first, second = printed(folder, tmp_path / "masked.txt")
    assert second == {"prediction": "no mask", "masks": []}
    assert len(first["masks"]) == 2
    for mask in first["masks"]:
        chances = [row["probability"] for row in mask]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 5
    best = [mask[0]["token"] for mask in first["masks"]]
    assert first["prediction"] == f"def {best[0]}oo({best[1]})"
    predict(folder, tmp_path / "masked.txt")
    (tmp_path / "long.txt").write_text(f"{'d(' * 12}\n{'d(' * 60}\n{'d(' * 90}<mask>\n")
    _, _, output = call("predict", folder, f"--inputs={tmp_path / 'long.txt'}")
    assert output == "note: 2 inputs are truncated to 24 tokens, task.sequence_length\n"
    hidden = write_jsonl(tmp_path / "hidden.jsonl", [{"masks": [best[0], first["masks"][1][2]["token"]]}, {}])
    assert score("fill_mask", "out.jsonl", hidden) == {"accuracy": 0.5, "any_accuracy": 1}
    (tmp_path / "hidden.txt").write_text("a b\nc\n")
    code, _, output = call("score", "--metric=fill_mask", f"--predictions={tmp_path / 'out.jsonl'}",
                         f"--references={tmp_path / 'hidden.txt'}")  # fmt: skip
    assert code == 1
    assert "Text 2 has 0 masks and 1 hidden tokens." in output


@pytest.mark.thorough
def test_features_of_texts(trained, predict, tmp_path):
    folder, _ = trained("bert", MASKED | {"task.name": "masked_lm", "model.dropout": 0.0}, steps=1)
    texts = ["import os", "d"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    found = predict(folder, tmp_path / "texts.txt", "--features")
    experiment = Experiment(cli.load(str(folder / "config.json"))[0], folder)
    variables, encoder = experiment.restore().variables(), experiment.model
    for row, text in zip(found, texts):
        tokens = experiment.data.tokenizer.encode(text)[None]
        hidden = encoder.apply(variables, jnp.asarray(tokens), method="encode")
        np.testing.assert_allclose(row["features"], hidden[0].mean(axis=0), atol=1e-5)


@pytest.mark.thorough
def test_interrupted_predictions_continue(trained, predict, refused, tmp_path):
    """Check that a file that ends anywhere is completed, also where tokens are sampled, and what is refused."""
    folder, _ = trained("gpt", {"tokenizer": "bytes", "sampling.temperature": 1.0}, steps=1)
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("text,other\n" + "".join(f"a{number},b\n" for number in range(50)))
    actual = predict(folder, prompts, "--batch-size=8")
    assert len({row["prediction"] for row in actual}) >= 8  # those of a batch differ
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    for size in (0, 1, whole.index(b"\n") + 1, len(whole) // 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        assert predict(folder, prompts, "--batch-size=8") == actual
        assert path.read_bytes() == whole
    files = folder, f"--inputs={prompts}", f"--output={path}", "--batch-size=8"
    changes = {"--config.sampling.temperature=0.5": "config.sampling.temperature", "--columns=other": "inputs"}
    changes |= {"--batch-size=16": "batch_size, config.loader.evaluation_batch_size"}
    for option, what in changes.items():
        message = refused(*files, option)
        assert f"out.jsonl has predictions with other settings ({what}): choose another --output, or delete" in message
    prompts.write_text("text\nb\n")
    assert "out.jsonl has predictions with other settings (inputs)" in refused(*files)
    message = refused(*files[:2], f"--output={tmp_path / 'out.json'}", "--batch-size=8")
    assert "out.jsonl, from which out.json is made, has predictions with other settings (inputs): choose" in message
    (tmp_path / "out.jsonl.about.json").unlink()
    assert "out.jsonl is not a file of predictions: choose another --output." in refused(*files)
    assert path.read_bytes() == whole
    (final := tmp_path / "dev.json").write_text("mine")
    message = refused(folder, f"--inputs={prompts}", f"--output={final}")
    assert "dev.json exists, without dev.jsonl: choose another --output." in message
    assert final.read_text() == "mine"
    message = refused(folder, f"--inputs={prompts}", f"--output={tmp_path / 'a.txt'}")
    assert "a.txt': it must end with .jsonl, .json, .npz or .parquet." in message


@pytest.mark.thorough
def test_bad_texts_are_skipped(trained, call, refused, tmp_path):
    """Check that texts which cannot be read, encoded or continued do not change the others, also in a later start."""
    folder, _ = trained("gpt", {"tokenizer": "bytes", "sampling.temperature": 1.0, "sampling.max_new_tokens": 4})
    rows, path, out = [f'{{"text": "a{number}"}}' for number in range(33)], tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    bad = {3: "{", 8: '{"text": ""}', 9: '{"text": "\\ud800"}', 20: json.dumps({"text": "b" * 16}), 32: '{"n": 1}'}
    files = folder, f"--inputs={path}", f"--output={out}", "--batch-size=8"

    def predict(*options):
        code, _, output = call("predict", *files, *options)
        assert code == 0, output
        content = out.read_bytes()
        out.unlink()
        return content, output

    beams = "--config.sampling.num_beams=2", "--config.sampling.temperature=0"
    path.write_text("\n".join(rows))
    good = [predict(*options)[0].splitlines() for options in ((), beams)]
    path.write_text("\n".join(bad.get(number, row) for number, row in enumerate(rows)))
    assert "a.jsonl, line 33 has no column 'text'" in refused(*files, "--skip-bad=1")
    assert "error: prompt 20 has 16 tokens: it must have fewer" in refused(*files, "--skip-bad=3")
    out.unlink()
    for options, expected in zip(((), beams), good):
        content, output = predict("--skip-bad=5", *options)
        assert "33 predictions (5 of them errors): " in output
        lines = content.splitlines()
        assert [number for number, (one, other) in enumerate(zip(lines, expected)) if one != other] == list(bad)
        assert [[*json.loads(lines[number])] for number in bad] == [["error"]] * 5
    out.write_bytes(content[: len(content) // 2])
    assert predict("--skip-bad=5", *beams)[0] == content
    path.write_text('{"text": ""}\n')
    assert "error: The text '' has no token" in refused(*files, "--skip-bad=1")


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".json", ".npz", ".parquet"])
def test_output_is_not_held_in_memory(suffix, tmp_path):
    features = np.random.default_rng(0).random((4000, 64), np.float32)
    output = Output(str(tmp_path / f"out{suffix}"), {"features": True})
    output.write([[{"file": f"{number}.png", "features": row.tolist()} for number, row in enumerate(features)]])
    pa.Table.from_pylist([{"a": 1}])  # imports modules on first use
    tracemalloc.start()
    output.finish(iter)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 7e6  # all rows have 9 MB
    if suffix == ".json":
        actual = json.loads(output.final.read_text())
        assert actual == [json.loads(line) for line in output.path.read_text().splitlines()]
    elif suffix == ".npz":
        actual = [{"features": row} for row in np.load(output.final)["features"]]
    else:
        actual = pq.read_table(output.final).to_pylist()
        assert actual[7]["file"] == "7.png"
    np.testing.assert_array_equal([row["features"] for row in actual], features)


@pytest.mark.parametrize("text", ["[]\n", "5\n", "torn\n", "[" * 100_000 + "\n"])
def test_damaged_output_is_named(text, tmp_path):
    path = tmp_path / "out.jsonl"
    Output(str(path), {"a": 1})
    path.write_text('{"label": "a"}\n' + text)
    with pytest.raises(ValueError, match=r"out\.jsonl, line 2 is damaged: delete the file"):
        Output(str(path), {"a": 1})


def test_output_that_is_one_of_the_inputs_is_refused(tmp_path):
    """Check a second command, whose predictions the first one has already written in another format."""
    (inputs := tmp_path / "dev.json").write_text("mine")
    (tmp_path / "link.json").symlink_to(inputs)
    about = {"inputs": [str(inputs), "", None, {str(inputs): [4, 0]}]}
    Output(str(tmp_path / "dev.jsonl"), about).write([[{"label": "a"}]])
    Output(str(tmp_path / "link.jsonl"), about).write([[{"label": "a"}]])
    for name in ("dev.json", "link.json"):
        with pytest.raises(ValueError, match=rf"{name}', which is one of the inputs: choose another one"):
            Output(str(tmp_path / name), about)
    assert inputs.read_text() == "mine"


def test_output_that_another_process_writes_raises(tmp_path):
    """Check that predictions of two commands are not mixed, even if both begin before the first one has predicted."""
    first = Output(str(tmp_path / "out.jsonl"), {"a": 1})
    for about in ({"a": 1}, {"a": 2}):
        with pytest.raises(ValueError, match=r"another process is writing .*out\.jsonl: wait for it"):
            Output(str(tmp_path / "out.jsonl"), about)
    first.write([[{"label": "a"}]])
    assert Output(str(tmp_path / "out.jsonl"), {"a": 1}).count == 1


def test_full_disk_is_reported_with_the_output(tmp_path):
    output, limits = Output(str(tmp_path / "out.jsonl"), {"a": 1}), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # as on a full disk, writing raises an OSError
    try:
        with pytest.raises(OSError, match=r"too large: '.*out\.jsonl'"):
            output.write([[{"label": "a"}], [{"label": "b"}]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Output(str(tmp_path / "out.jsonl"), {"a": 1}).count == 1


@pytest.mark.parametrize("other", [None, {"a": 2}])
def test_output_that_is_deleted_while_it_is_written_raises(other, tmp_path):
    """Check a file that is deleted, and one that is also replaced by that of another command."""
    output = Output(str(tmp_path / "out.json"), {"a": 1})

    def found():
        yield [{"label": "a"}]
        output.path.unlink()
        if other:
            Output(str(tmp_path / "out.json"), other).write([[{"label": "b"}]])
        yield [{"label": "c"}]

    with pytest.raises(ValueError, match=r"out\.jsonl was moved, deleted or replaced while it was written"):
        output.write(found())


def test_output_of_any_name_and_beside_other_images(tmp_path):
    """Check names that are not UTF-8, which JSON escapes, and that images are not written among those of others."""
    output = Output(str(tmp_path / "out.jsonl"), {"a": 1})
    output.write([[{"file": "caf\udce9.png", "label": "\u00e9"}]])
    assert output.path.read_bytes() == b'{"file": "caf\\udce9.png", "label": "\xc3\xa9"}\n'
    assert json.loads(output.path.read_text())["file"] == "caf\udce9.png"
    assert Output(str(tmp_path / "out.jsonl"), {"a": 1}).count == 1
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.png").write_text("mine")
    pictures = [[{"masked": np.zeros((2, 2, 1), np.uint8)}]]
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is not a regular file"):
        Output(str(tmp_path / "pipe.jsonl"), {})
    with pytest.raises(ValueError, match=r"its images go to .*/photos, which has mine\.png"):
        Output(str(tmp_path / "photos.jsonl"), {}).write(pictures)
    (tmp_path / "photos" / "mine.png").unlink()
    for _ in range(2):  # an interrupted command goes on
        Output(str(tmp_path / "photos.jsonl"), {}).write(pictures)
    assert len(list((tmp_path / "photos").iterdir())) == 2
