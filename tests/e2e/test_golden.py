"""Golden values: three training steps and an evaluation of small versions of the experiments.

python -m tests.e2e.test_golden        record them again, after a change that is meant to change results
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from lineage.configs import base, cli
from lineage.train.loop import train

RECORDS = Path(__file__).with_name("golden.json")
SIZES = {"depth": 2, "decoder_depth": 2, "width": 32, "embed_width": 16, "num_heads": 2, "head_size": 16, "mlp_dim": 64}
SIZES |= {"cell_dim": 32, "projection_dim": 16, "memory_length": 16, "unroll": 1}
# Experiment -> the source that replaces its own, and the model's sizes that `SIZES` does not suit.
EXPERIMENTS = {
    "gpt_shakespeare_char": ("text:{}/texts", {}),
    "llama_stdlib": ("text:{}/texts", {"num_kv_heads": 1}),
    "transformer_xl_stdlib": ("text:{}/texts", {}),
    "bert_stdlib": ("text:{}/texts", {}),
    "bart_stdlib": ("text:{}/texts", {}),
    "t5_stdlib": ("text:{}/texts", {}),
    "elmo_stdlib": ("text:{}/texts", {}),
    "seq2seq_cldr": ("pairs:{}/pairs.tsv", {}),
    "transformer_cldr": ("pairs:{}/pairs.tsv", {}),
    "bert_tagging_ud": ("bio:{}/tags.txt", {"num_classes": 2}),
    "vit_digits": ("digits", {}),
    "mae_digits": ("digits", {}),
    "resnet_digits": ("digits", {}),
    "swin_digits": ("digits", {"depth": None, "num_heads": None}),
    "detr_shapes": ("shapes", {}),
}


def write_data(folder: Path) -> None:
    """Write texts, pairs of texts and tagged sentences of random words."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(rng.choice([*"abcdefghij"], rng.integers(2, 8))) for _ in range(60)])
    sentences = [rng.choice(words, rng.integers(4, 12)).tolist() for _ in range(300)]
    paragraphs = [". ".join(map(" ".join, sentences[i : i + 3])) + "." for i in range(0, 300, 3)]
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text("\n\n".join(paragraphs[number::20]))
    (folder / "pairs.tsv").write_text("".join(f"{' '.join(s)[:30]}\t{' '.join(s[::-1])[:30]}\n" for s in sentences))
    tagged = ("".join(f"{word} {'B-X' if len(word) > 4 else 'O'}\n" for word in sentence) for sentence in sentences)
    (folder / "tags.txt").write_text("\n".join(tagged))


def measure(name: str, data: Path, workdir: Path) -> dict[str, float]:
    """Return the metrics of three training steps and of an evaluation, by step and name."""
    source, sizes = EXPERIMENTS[name]
    config, _ = cli.load(name)
    base.choose(config, "source", source.format(data))
    if "validation_path" in config.source:
        config.source.validation_path = config.source.path
    sizes = {key: value for key, value in (SIZES | sizes).items() if key in config.model and value is not None}
    config.model.update(sizes)
    config.loader.update(batch_size=8, evaluation_batch_size=16)
    config.update(total_steps=3, log_every_steps=1, evaluate_every_steps=3, save_every_steps=3)
    config.sampling.num_samples = 0
    if name == "resnet_digits":  # larger steps through batch norms over 8 examples amplify rounding 5,000 times
        config.schedule.learning_rate = 1e-3
    if name == "detr_shapes":  # larger steps amplify the differences between processors to 6e-5
        config.schedule.learning_rate = 1e-4
    train(config, workdir, devices=jax.devices()[:1])
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    values = {f"{row['step']} {key}": value for row in rows for key, value in row.items()}
    return {
        key: value for key, value in values.items() if key.split()[1].startswith(("train/", "validation/", "test/"))
    }


def close(key: str, value: float) -> object:
    """Return the recorded value of a metric with its tolerance.

    With instruction sets from SSE 4.2 to AVX2, losses and gradient norms differ by less than 1e-6 of their value.
    Metrics of decisions may change more, where two classes are nearly equally probable.
    """
    continuous = "loss", "gradient_norm", "learning_rate", "perplexity", "bits_per"
    if any(name in key for name in continuous):
        return pytest.approx(value, rel=1e-5, abs=1e-7)
    return pytest.approx(value, rel=0.1, abs=1e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("swin_digits", "detr_shapes"))) for name in EXPERIMENTS],
)
def test_experiments_match_golden_values(name, data, no_report, tmp_path):
    recorded, actual = json.loads(RECORDS.read_text())[name], measure(name, data, tmp_path / "run")
    assert actual.keys() == recorded.keys()
    for key, value in recorded.items():
        assert actual[key] == close(key, value), key


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        records = {name: measure(name, Path(folder), Path(folder, name)) for name in EXPERIMENTS}
    Path(*sys.argv[1:2] or [RECORDS]).write_text(json.dumps(records, indent=1) + "\n")
