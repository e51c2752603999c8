"""Training on a mixture of sources: evaluation of each source, and exact resumption."""

import json
import shutil

import pytest

from lineage.configs import cli
from lineage.data import SOURCES
from lineage.runs.folder import MEASURED, read_metrics
from lineage.train import loop
from tests.train.runs import ONE

pytestmark = [pytest.mark.usefixtures("no_report"), pytest.mark.thorough]


@pytest.fixture
def config(tmp_path):
    """Return `t5_multitask` with a tiny model, and three small files as its sources."""
    config, _ = cli.load("t5_multitask")
    config.model.update(depth=1, width=16, num_heads=2, head_size=8, mlp_dim=32, unroll=1)
    config.task.sequence_length = 32
    config.loader.update(batch_size=8, evaluation_batch_size=16)
    config.tokenizer.vocab_size = 400
    config.update(total_steps=7, log_every_steps=2, save_every_steps=3, evaluate_every_steps=7)
    config.sampling.update(prompt="up: 3", max_new_tokens=4)
    parts = []
    for part, size in zip(config.source.parts, (40, 20, 10)):
        for split in ("train", "dev"):
            rows = [{"input": f"{part['name']} number {k}", "target": f"{k} {part['name']}"} for k in range(size)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{part['name']}.{split}.jsonl").write_text(text)
        files = (str(tmp_path / f"{part['name']}.{split}.jsonl") for split in ("train", "dev"))
        parts.append({key: part[key] for key in ("name", "prefix")} | dict(zip(("source", "validation_path"), files)))
        parts[-1]["source"] = f"pairs:{parts[-1]['source']}"
    config.source.parts = tuple(parts)
    return config


def history(workdir):
    return [
        {key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in read_metrics(workdir)
    ]


@pytest.mark.slow
def test_tasks_are_learned_together_and_resumed_exactly(config, tmp_path, interrupted):
    metrics = loop.train(config, tmp_path / "whole", devices=ONE)
    assert list(dict.fromkeys(key.partition("/")[0] for key in metrics)) == [
        f"validation_{name}" for name in ("iso", "language", "summary")
    ]
    assert {"loss", "exact_match", "bleu"} <= {key.partition("/")[2] for key in metrics}
    kept = json.loads((tmp_path / "whole" / "config.json").read_text())["source"]
    assert kept["parts"][1]["prefix"] == "language: "
    interrupted(6, lambda: loop.train(config, tmp_path / "parts", devices=ONE))
    assert loop.train(config, tmp_path / "parts", devices=ONE) == metrics
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    (tmp_path / "iso.train.jsonl").write_text('{"input": "a", "target": "b"}\n')
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "7")
    with pytest.raises(ValueError, match=r"iso\.train\.jsonl changed since the run"):
        loop.train(config, tmp_path / "parts", devices=ONE)


def test_the_experiment_has_three_tasks():
    """Check what `t5_multitask` reads without training it."""
    config, _ = cli.load("t5_multitask")
    source = SOURCES.build(**config.source.to_dict())
    content = source.read_parts("pairs")
    assert [content[name]["train"].inputs[0].partition(": ")[0] for name in content] == [
        "translate to ISO 8601",
        "language",
        "summarize",
    ]
    iso, language, summary = (content[name]["train"] for name in ("iso", "language", "summary"))
    assert len(iso.inputs) == len(language.inputs) > 20_000
    assert set(language.targets) == {"en", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "tr", "fi"}
    assert [text.partition(": ")[2] for text in iso.inputs] == [text.partition(": ")[2] for text in language.inputs]
    assert len(summary.inputs) > 3000
    assert not any('"""' in text.partition("(")[0] for text in summary.inputs)
    assert source.proportions([29_000, 29_000, 5000]) == [10_000, 10_000, 5000]
