"""Language models, BART and BERT read the token that a tokenizer adds before each text, such as <s>."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from lineage import models
from lineage.configs import cli
from lineage.configs.atomic import write_record
from lineage.data import Documents, Facts, Loader, PairedTexts, Tokenizer
from lineage.data.facts import FACTS
from lineage.data.sources.base import Source
from lineage.evaluation.likelihood import LanguageModel
from lineage.evaluation.sampling import Sampler
from lineage.tasks import TASKS
from lineage.train import expert_mixture, loop, trained
from lineage.train.experiment import Experiment
from tests.data.conftest import load, train

TEXTS = ["one two", "three", "four five six"]


@pytest.fixture
def tokenizer():
    backend = tokenizers.Tokenizer.from_str(train("bytes", [], ("end_of_text", "cls", "pad", "mask")).to_str())
    special = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return Tokenizer(backend)


class Texts(Source):
    def documents(self):
        return {"train": Documents(TEXTS), "test": Documents(TEXTS)}

    def pairs(self):
        texts = PairedTexts(TEXTS, TEXTS[::-1])
        return {"train": texts, "test": texts}


@pytest.mark.parametrize("options", [{}, {"packing": True}])
def test_documents(options, tokenizer):
    data = load(Texts(), TASKS["causal_lm"](sequence_length=40, **options), tokenizer, batch_size=1)
    batch = data.splits["test"].source.take(np.arange(1))
    assert data.facts.begin_token == tokenizer.cls
    assert (batch["tokens"] == tokenizer.cls).sum() == 3
    follows = batch["targets"][batch["tokens"] == tokenizer.cls]
    assert sorted(follows) == sorted(text.encode()[0] for text in TEXTS)


@pytest.mark.parametrize(("packing", "tokens"), [(True, 28), (False, 31)])
def test_bits_per_byte_count_predicted_tokens(packing, tokens, tokenizer):
    data = load(Texts(), TASKS["causal_lm"](sequence_length=40, packing=packing), tokenizer, batch_size=1)
    assert data.splits["test"].source.take(np.arange(1))["mask"].sum() == (tokens if packing else tokens - 1)
    assert data.facts.bytes_per_token["test"] == data.facts.characters_per_token["test"] == 25 / tokens


def test_other_tasks_do_not_read_it(tokenizer):
    data = load(Texts(), TASKS["masked_lm"](sequence_length=20), tokenizer, batch_size=3)
    batch = data.splits["test"].source.take(np.arange(1))
    assert data.facts.begin_token is None
    assert not any((value == tokenizer.cls).any() for value in batch.values())


def test_pairs(tokenizer):
    """Check that the inputs in the data, in a prompt and in a file for predictions are the same."""
    task = TASKS["conditional_lm"](sequence_length=40)
    data = load(Texts(), task, tokenizer, batch_size=3)
    batch = data.splits["test"].source.take(np.arange(3))
    prompts, lengths, _ = task.requests(batch, data.facts)
    read = task.requests(task.input_examples(TEXTS, tokenizer, data.facts).source.take(np.arange(3)), data.facts)
    for row, text in enumerate(TEXTS):
        expected = [tokenizer.cls, *text.encode(), tokenizer.end_of_text]
        assert prompts[row, : lengths[row]].tolist() == expected
        assert read.prompts[row, : read.lengths[row]].tolist() == expected
        assert task.request(tokenizer.encode(text), tokenizer, data.facts).prompts.tolist() == [expected]
        targets = batch["targets"][row][batch["mask"][row]].tolist()
        assert targets == [*TEXTS[::-1][row].encode(), tokenizer.end_of_text]


@pytest.mark.parametrize(
    ("name", "options"), [("sequence_to_sequence", {}), ("denoising", {"noise": "infill(0.3, 3)"})]
)
def test_inputs_and_targets_of_encoder_decoders(name, options, tokenizer):
    task = TASKS[name](sequence_length=20, **options)
    data = load(Texts(), task, tokenizer, batch_size=3)
    batch, end = data.splits["test"][0], tokenizer.end_of_text
    read = task.input_examples(TEXTS, tokenizer, data.facts).source.take(np.arange(1))
    targets = batch["targets"][0][batch["mask"][0]]
    for tokens in (targets, *(row["inputs"][0][row["inputs_mask"][0]] for row in (batch, read))):
        assert (tokens[0], tokens[-1]) == (tokenizer.cls, end)
        assert list(tokens).count(tokenizer.cls) == 1
    assert batch["tokens"][0, :2].tolist() == [end, tokenizer.cls]
    assert task.request(np.array([5]), tokenizer, data.facts).inputs[0].tolist() == [[tokenizer.cls, 5, end]]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_bart_answers_as_in_transformers(num_beams, tokenizer, tmp_path):
    """Check the tokens before inputs and targets with the texts that a model generates."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.exported(tokenizer.cls, tokenizer.end_of_text))
    names = {"eos_token": "<|endoftext|>", "pad_token": "<pad>", "bos_token": "<s>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    theirs.save_pretrained(tmp_path)
    start, end = tokenizer.cls, tokenizer.end_of_text
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 16, "max_position_embeddings": 64, "init_std": 1.0}
    sizes |= {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    ids = {"bos_token_id": start, "eos_token_id": end, "decoder_start_token_id": end, "forced_bos_token_id": start}
    torch.manual_seed(0)
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": tokenizer.pad, "forced_eos_token_id": None}
    config = transformers.BartConfig(**sizes)
    reference = transformers.BartForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    settings = {"max_new_tokens": 12, "num_beams": num_beams, "do_sample": False, "early_stopping": False} | ids
    expected = []
    for text in TEXTS:
        found = reference.generate(torch.tensor([theirs(text)["input_ids"]]), **settings)
        expected.append(theirs.decode(found[0], skip_special_tokens=True))
    changes = {"max_new_tokens": 12, "num_beams": num_beams, "temperature": 0}
    changes = {f"sampling.{name}": str(value) for name, value in changes.items()}
    ours = trained.load(tmp_path, task="sequence_to_sequence", changes=changes)
    assert [row["prediction"] for row in ours.predict(TEXTS)] == expected
    assert ours.generate(TEXTS[0]) == expected[:1]


def test_questions_to_experts(tokenizer, monkeypatch):
    """Check that a question about an example has the token once, before the whole question."""
    asked = []

    class Recorded(LanguageModel):
        def of_tokens(self, pairs):
            asked.extend(np.concatenate(pair).tolist() for pair in pairs)
            return super().of_tokens(pairs)

    monkeypatch.setattr(expert_mixture, "LanguageModel", Recorded)
    model = models.build("gpt", depth=1, width=8, num_heads=1, vocab_size=tokenizer.vocab_size, max_length=16)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    tokens = np.array([[tokenizer.cls, *b"ab", tokenizer.cls, *b"c"]])
    experts = SimpleNamespace(question="{text} ({name})", examples=1)
    experiment = SimpleNamespace(
        config=SimpleNamespace(experts=experts), model=model, tokenizer=tokenizer,
        facts=Facts(begin_token=tokenizer.cls), loader=Loader(batch_size=1),
        data=SimpleNamespace(train=[{"tokens": tokens, "mask": np.ones(tokens.shape, bool)}]),
    )  # fmt: skip
    expert_mixture._answer(experiment, variables["params"], ["x", "y"], None)
    assert asked == [[tokenizer.cls, *b"abc (x)"], [tokenizer.cls, *b"abc (y)"]]


@pytest.mark.thorough
def test_a_run_without_it_stays_without_it(tokenizer, tmp_path):
    """Check a run of a version that did not add the token: such a run is evaluated as before, but not continued."""
    (tmp_path / "texts.txt").write_text(" ".join(TEXTS * 20))
    tokenizer.save(tmp_path / "tokenizer.json")
    config, _ = cli.load("tests/tiny.py:gpt")
    named = {"source": f"text:{tmp_path / 'texts.txt'}", "tokenizer": f"file:{tmp_path / 'tokenizer.json'}"}
    cli.override(config, named | {"source.test_path": str(tmp_path / "texts.txt"), "total_steps": 1})
    run, one = tmp_path / "run", jax.devices()[:1]
    loop.train(config, run, devices=one)
    facts = Facts.load(run / FACTS)
    assert facts.begin_token == tokenizer.cls
    experiment = Experiment(config, run, one, saved_facts=facts)
    sampler = Sampler(experiment.context())
    assert len(sampler.write(experiment.restore().variables(), "")) == 1
    config.total_steps = 2
    write_record(run / FACTS, asdict(replace(facts, begin_token=None)))
    with pytest.raises(
        ValueError, match=f"the token before each text was None in the run .*, and is now {tokenizer.cls}: "
    ):
        loop.train(config, run, devices=one)
    experiment = Experiment(config, run, one, saved_facts=Facts.load(run / FACTS))
    batch = experiment.evaluation_data.splits["test"].source.take(np.arange(1))
    assert not (batch["tokens"] == tokenizer.cls).any()
    with pytest.raises(ValueError, match="The prompt is empty"):
        Sampler(experiment.context()).write(experiment.restore().variables(), "")
