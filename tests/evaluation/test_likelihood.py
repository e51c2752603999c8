"""Likelihoods match `transformers` and the LM evaluation harness on a converted GPT-2; its tasks give equal scores."""

import json
import math
import re
import shutil
from functools import partial

import lm_eval
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.hellaswag.utils import process_docs
from tokenizers.processors import TemplateProcessing

from lineage import launch
from lineage.data import Tokenizer
from lineage.data.tokenizers.kinds import BPE
from lineage.evaluation import harness as harnesses
from lineage.evaluation import score
from lineage.evaluation.harness import Harness
from lineage.evaluation.likelihood import (
    LanguageModel,
    Likelihood,
    detection_scores,
    last_word_scores,
    perplexity_scores,
)
from lineage.models import build, convert
from lineage.train.trained import language_model, load

WORDS = re.findall(r"\w+", "the cat sat on a mat and it saw dogs run over green hills until night fell")


def sentences(count, seed):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(3, 12))) for _ in range(count)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "begun"])
def folder(request, tmp_path_factory):
    """Write a GPT-2 with random weights, large enough that its probabilities differ, and a tokenizer.

    The tokenizer may add a token before each text, as Llama's does.
    """
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = BPE(vocab_size=320).train(sentences(200, 0), special_tokens=("end_of_text", "cls"))
    if request.param:
        backend = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.cls)])
        tokenizer = Tokenizer(backend)
    tokenizer.save(folder)
    end, begin = tokenizer.end_of_text, tokenizer.cls if request.param else tokenizer.end_of_text
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=24, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=begin, eos_token_id=end,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    names = {"eos_token": tokenizer.decode([end]), "bos_token": tokenizer.decode([begin])}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    fast.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    tokenizer = Tokenizer.load(folder)
    return LanguageModel(*convert.load(folder), tokenizer, tokenizer.begin_of_text, batch_size=3)


@pytest.fixture(scope="module")
def theirs(folder):
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)


def test_perplexity_of_impossible_texts_is_infinite():
    class Certain(LanguageModel):
        def __init__(self):
            pass

        def of_texts(self, texts):
            return [Likelihood(-1000.0, False, 1) for _ in texts]

        def of_continuations(self, pairs):
            return self.of_texts(pairs)

    assert perplexity_scores(Certain(), ["a"])["perplexity"] == math.inf
    assert last_word_scores(Certain(), ["a b"])["perplexity"] == math.inf


def test_perplexity_matches_transformers(folder, ours, tmp_path):
    texts = [text for text in sentences(7, 1) if len(ours.tokenizer.encode(text)) <= ours.length]
    model, nats, tokens = transformers.AutoModelForCausalLM.from_pretrained(folder), 0.0, 0
    for text in texts:
        ids = torch.tensor([[ours.start, *ours.tokenizer.encode(text).tolist()]])[:, : ours.length + 1]
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits.log_softmax(-1)
        nats -= float(logits.gather(-1, ids[:, 1:, None]).sum())
        tokens += ids.shape[1] - 1
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    result = score.score_files("perplexity", f"{tmp_path}/texts.txt", (), [f"model={folder}"], lambda path: ours)
    scores = result["scores"]
    assert scores["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert scores["tokens"] == tokens
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / len("".join(texts)), rel=1e-5)
    assert result["options"] == {"model": str(folder)}


def test_prompts_match_transformers(folder):
    changes = {"sampling.max_new_tokens": 6, "sampling.temperature": 0.0}
    model = load(folder, task="causal_lm", changes=changes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompts = sentences(5, 8)
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = peer.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(out, skip_special_tokens=True))
    assert [model.generate(prompt)[0] for prompt in prompts] == expected
    assert [row["prediction"] for row in model.predict(prompts)] == expected


def test_long_texts_match_the_harness(folder, ours):
    # By default, the harness begins a text twice: as the tokenizer does, and with its own prefix.
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, add_bos_token=False)
    texts = [" ".join(sentences(n, n)) for n in (1, 4, 9, 20)] + ["a"]
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    expected = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    np.testing.assert_allclose([each.log for each in ours.of_texts(texts)], expected, rtol=1e-5)
    assert Harness(ours).loglikelihood_rolling(requests) == [each.log for each in ours.of_texts(texts)]


def rows_of(name):
    """Return rows of HellaSwag, whose right endings are single words and so the most probable ones, or of PIQA."""
    some = iter(sentences(200, 3))
    if name == "hellaswag":
        return [
            {
                "activity_label": "Baking [step]", "ctx_a": next(some) + " [title]", "ctx_b": next(some),
                "endings": [WORDS[i] if i == number % 4 else next(some) for i in range(4)], "label": str(number % 4),
            }
            for number in range(12)
        ]  # fmt: skip
    return [{"goal": next(some), "sol1": next(some), "sol2": next(some), "label": number % 2} for number in range(20)]


TASKS = {
    "hellaswag": {"doc_to_text": "{{query}}", "doc_to_target": "{{label}}", "doc_to_choice": "choices"},
    "piqa": {
        "doc_to_text": "Question: {{goal}}\nAnswer:", "doc_to_target": "label", "doc_to_choice": "{{[sol1, sol2]}}",
    },
    "lambada": {
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}", "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "output_type": "loglikelihood",
    },
    "write": {
        "doc_to_text": "{{text}}", "doc_to_target": "x", "output_type": "generate_until",
        "generation_kwargs": {"until": [" the", "\n"], "max_gen_toks": 6, "do_sample": False},
    },
}  # fmt: skip


def harness(model, name, path):
    """Return the scores and the answers of a model for a task of the harness that reads a local file."""
    metrics = {"lambada": ["perplexity", "acc"], "write": ["exact_match"]}.get(name, ["acc", "acc_norm"])
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test", "output_type": "multiple_choice", "metric_list": [{"metric": each} for each in metrics],
    }  # fmt: skip
    task |= TASKS[name] | ({"process_docs": process_docs} if name == "hellaswag" else {})
    found = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0)
    answers = [each["resps"] for each in found["samples"][name]]
    return [found["results"][name][f"{metric},none"] for metric in metrics], answers


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_match_the_harness(name, ours, theirs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    path = tmp_path / "rows.jsonl"
    rows = [{"text": text} for text in sentences(15, 4)] if name in ("lambada", "write") else rows_of(name)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected, answers = harness(theirs, name, path)
    actual, own_answers = harness(Harness(ours), name, path)
    assert actual == pytest.approx(expected, rel=1e-5)
    if name == "write":
        assert own_answers == answers
        return
    scores = score.score_files(name, str(path), (), ["model=x"], lambda path: ours)["scores"]
    keys = ("perplexity", "accuracy") if name == "lambada" else ("accuracy", "accuracy_by_length")
    assert [scores[key] for key in keys] == pytest.approx(expected, rel=1e-5)
    assert len({*expected}) > 1  # the two scores differ, so that neither passes for the other


def test_settings_of_tasks(ours):
    def write(count, **settings):
        pair = ("the cat", {"until": ["\n"], "max_gen_toks": 8} | settings)
        return Harness(ours).generate_until([Instance("generate_until", {}, pair, 0)] * count)

    assert write(1, num_beams=1, max_gen_toks=None, max_new_tokens=8) == write(1)
    samples = write(6, do_sample=True)
    assert samples[:3] != samples[3:]  # the samples of a prompt differ between the batches
    with pytest.raises(ValueError, match="generation_kwargs has 'penalty_alpha': it may have until, "):
        write(1, penalty_alpha=0.5)


def test_empty_context_is_continued_from_the_token_before_texts(ours, theirs):
    settings = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}

    def write(model, *contexts):
        return model.generate_until([Instance("generate_until", {}, (text, settings), 0) for text in contexts])

    expected = write(theirs, ours.tokenizer.decode([ours.start]))
    assert write(Harness(ours), "") == expected
    assert write(Harness(ours), "the cat", "") == [*write(theirs, "the cat"), *expected]


@pytest.mark.thorough
def test_special_tokens_in_texts_match_the_harness(folder, tmp_path):
    """Check that any end token of the model ends a text, as a name in `until` does, and that others are omitted."""
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(folder), Tokenizer.load(folder)
    end = int(tokenizer.encode("a")[0])
    for config in (model.config, model.generation_config):
        config.eos_token_id = [tokenizer.end_of_text, end]
    with torch.no_grad():
        model.transformer.wte.weight[[tokenizer.cls, end]] *= 1.5
    shutil.copytree(folder, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    ours, seen = Harness(language_model(tmp_path / "model")), set()
    theirs = HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", batch_size=1)
    for until in ([], [tokenizer.decode([tokenizer.cls])]):
        settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
        requests = [Instance("generate_until", {}, (text, settings), 0) for text in sentences(12, 9)]
        expected = theirs.generate_until(requests, disable_tqdm=True)
        assert ours.generate_until(requests) == expected
        seen |= {*expected}
    assert len(seen) > 6


@pytest.mark.thorough
def test_commands(folder, ours, tmp_path, monkeypatch, capsys):
    """Check that both commands find the model in a folder, and that a task in a file is found."""
    own_only = partial(harnesses.TaskManager, include_defaults=False)  # the package has thousands of files of tasks
    monkeypatch.setattr(harnesses, "TaskManager", own_only)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    rows, texts = tmp_path / "rows.jsonl", sentences(4, 4)
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "own.yaml").write_text(
        f"""
task: own_lambada
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity}}]
"""
    )
    common = [f"--model={folder}", f"--output={tmp_path}/out.json"]
    assert launch.main(["score", "--metric=lambada", f"--predictions={rows}", *common]) == 0, capsys.readouterr().err
    scores = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert scores == pytest.approx(last_word_scores(ours, texts), rel=1e-5)
    command = ["harness", "--tasks=own_lambada", f"--include-path={tmp_path}"]
    assert launch.main([*command, *common, "--limit=4"]) == 0, capsys.readouterr().err
    actual = json.loads((tmp_path / "out.json").read_text())["results"]["own_lambada"]
    assert actual["perplexity,none"] == pytest.approx(scores["perplexity"], rel=1e-5)
    assert "own_lambada" in capsys.readouterr().out
    for arguments, message in (
        (["harness", "--tasks=own_lambada"], "--model (a run or folder) and --tasks"),
        (["harness", "--tasks=none", f"--model={folder}"], "The harness has no task 'none'"),
        (["harness", "--tasks=none", f"--model={folder}", "--limit=0"], "--limit is 0: it must be at least 1"),
        (["harness", "--tasks=none", f"--model={folder}", f"--output={tmp_path}"], "which is not a file: choose"),
        (["score", "--metric=perplexity", "--predictions=none", f"--output={tmp_path}"], "which is not a file: choose"),
        (["score", "--metric=bleu", f"--predictions={rows}", "--model=x"], "bleu has no option 'model'"),
    ):
        assert launch.main(arguments) == 1
        assert message in capsys.readouterr().err


def test_detector(ours):
    """Check that texts which the model itself writes are told from random ones, and the burstiness of equal lengths."""
    machine = ["the cat sat. the cat ran. the cat saw."] * 6
    human = [f"{a}. {b}! night." for a, b in zip(sentences(6, 5), sentences(6, 6))]
    scores = detection_scores(ours, machine, human, samples=50, seed=0)
    assert scores["auroc_burstiness"] == 1
    assert scores["auroc_burstiness_low"] == 1
    nats = [-each.log / each.tokens for each in ours.of_texts([machine[0], *human])]
    assert scores["auroc_perplexity"] == pytest.approx(np.mean(np.array(nats[1:]) > nats[0]))
    assert scores["auroc_perplexity_low"] <= scores["auroc_perplexity"] <= scores["auroc_perplexity_high"]


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("piqa", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', ["model=x"], "label 2 is not one of its 2 a"),
        ("piqa", '{"goal": "a", "sol1": "b"}', ["model=x"], "Entry 1, .* is not an entry of piqa: KeyError 'sol2'"),
        ("hellaswag", '["a"]', ["model=x"], "is not an entry of hellaswag: TypeError"),
        ("lambada", '"word"', ["model=x"], "The text 'word' has no last word"),
        ("perplexity", '"word"', [], "--model is missing: perplexity needs a causal language model"),
        ("perplexity", '""', ["model=x"], "The texts have no token to predict"),
    ],
)  # fmt: skip
def test_wrong_inputs(name, text, options, message, ours, tmp_path):
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        score.score_files(name, f"{tmp_path}/a.jsonl", (), options, lambda path: ours)


def test_continuations_without_a_token_of_their_own_are_refused(ours):
    """Check that a text without a token after its context does not get the probability 1."""
    assert len(ours.encode("the ca")) >= len(ours.encode("the cat"))
    pairs = [("the", " cat"), ("the ca", "t")]
    with pytest.raises(ValueError, match=r"Continuation 2 has no token: .*the ca'"):
        ours.of_continuations(pairs)
    with pytest.raises(ValueError, match=r"Continuation 2 has no token: .*the ca'"):
        Harness(ours).loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])


def test_white_space_between_texts_is_that_of_the_harness(ours):
    pairs = [("the cat" + space, f"{between}sat") for space in ("", " ", "\n", "\n ", "\t") for between in ("", " ")]
    expected = Harness(ours).loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    actual = [likelihood.log for likelihood in ours.of_continuations(pairs)]
    assert actual == pytest.approx([log for log, _ in expected])


def test_continuations_longer_than_the_model_are_refused(ours):
    """Check that no token is left out of a likelihood without a word; the harness refuses them too."""
    continuation = np.ones(ours.length, np.int32)
    (likelihood,) = ours.of_tokens([(np.array([2]), continuation)])
    assert likelihood.tokens == ours.length
    with pytest.raises(ValueError, match=r"Continuation 2 has 25 tokens: it must have at most 24, the maximum length"):
        ours.of_tokens([(np.array([2]), continuation), (np.array([2]), np.ones(ours.length + 1, np.int32))])


def test_other_models_are_refused(ours):
    with pytest.raises(ValueError, match="is a T5: likelihoods need a causal language model"):
        LanguageModel(build("t5", vocab_size=8), {}, ours.tokenizer)
