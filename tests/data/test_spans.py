import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.data import shuffle
from lineage.data.examples import corruption
from lineage.data.examples.corruption import CorruptSpans
from lineage.data.sources.text import Text
from lineage.data.tokenizers.kinds import TokenizerFile
from lineage.tasks.denoising import SpanCorruption
from tests.data.conftest import load, train

END, START = 1, 0
SENTINELS = np.arange(1000, 900, -1)


def windows(lengths, width):
    """Return windows of tokens 2, 3, ... with the given numbers of real tokens; `mask` refers to the targets."""
    tokens = np.tile(np.arange(2, width + 2), (len(lengths), 1)).astype(np.int32)
    targets = np.array([size if size == width else max(size - 1, 0) for size in lengths])
    return {"tokens": tokens, "targets": tokens + 1, "mask": np.arange(width) < targets[:, None]}


def corrupt(lengths, inputs_length, rate=0.15, seed=0):
    width, targets_length = corruption.lengths(rate, inputs_length)
    batch = windows(np.minimum(lengths, width), width)
    transform = CorruptSpans(rate, inputs_length, targets_length, SENTINELS, START, END)
    return batch, transform(batch, shuffle.keys(np.arange(len(lengths)), seed))


def restore(inputs, targets):
    """Return the text restored from inputs and targets without end tokens, and the spans that were not used."""
    spans, span = {}, []
    for token in targets:
        if token > 900:
            span = spans.setdefault(int(token), [])
        else:
            span.append(int(token))
    return [word for token in inputs for word in (spans.pop(int(token)) if token > 900 else [int(token)])], spans


@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=4),
    inputs_length=st.integers(4, 60),
    rate=st.floats(0.05, 0.6),
    seed=st.integers(0, 2**32),
)
def test_inputs_and_targets_restore_the_text(lengths, inputs_length, rate, seed):
    batch, corrupted = corrupt(lengths, inputs_length, rate, seed)
    for row in range(len(lengths)):
        size = min(lengths[row], batch["tokens"].shape[1])
        noise, count = corruption.count_noise(rate, size)
        inputs = corrupted["inputs"][row][corrupted["inputs_mask"][row]]
        targets = corrupted["targets"][row][corrupted["mask"][row]]
        assert inputs[-1] == targets[-1] == END
        assert (corrupted["inputs"][row][~corrupted["inputs_mask"][row]] == END).all()
        assert corrupted["tokens"][row, : len(targets)].tolist() == [START, *targets[:-1]]
        text, left = restore(inputs[:-1], targets[:-1])
        assert text == batch["tokens"][row, :size].tolist()
        assert not left
        assert inputs[inputs > 900].tolist() == SENTINELS[:count].tolist()
        assert len(targets) == noise + count + 1
        assert len(inputs) == size - noise + count + 1


def test_lengths_match_the_reference():
    """Check the published T5: 568 tokens give inputs of 512 and targets of 114 tokens; full windows fill both
    exactly.
    """
    assert corruption.lengths(0.15, 512) == (568, 114)
    assert corruption.count_noise(0.15, 568) == (85, 28)
    _, made = corrupt([568] * 4, 512)
    assert made["inputs"].shape == (4, 512)
    assert made["targets"].shape == (4, 114)
    assert made["inputs_mask"].all()
    assert made["mask"].all()


def test_segmentations_are_uniform():
    """Check the 36 ways to divide 10 tokens into 3 spans, within 5 standard deviations."""
    count = 36_000
    drawn = corruption.draw_spans(np.full(count, 10), np.full(count, 3), 15, shuffle.keys(np.arange(count), 0))
    assert (drawn.sum(axis=1) == 10).all()
    assert (drawn > 0).all()
    _, times = np.unique(drawn, axis=0, return_counts=True)
    assert len(times) == 36
    assert (np.abs(times - 1000) < 5 * 1000**0.5).all()


def test_noise_is_spread_over_the_text():
    batch = windows([100] * 5000, 100)
    noise = corruption.draw_noise(0.15, batch["mask"], shuffle.keys(np.arange(5000), 1))
    assert (noise.sum(axis=1) == 15).all()
    assert ((noise[:, 1:] & ~noise[:, :-1]).sum(axis=1) == 5).all()  # five spans: three tokens on average
    assert not noise[:, 0].any()  # a text begins with an uncorrupted token and ends with a noise span
    assert noise[:, -1].all()
    np.testing.assert_allclose(noise[:, 20:80].mean(axis=0), 0.15, atol=0.04)


def test_padded_rows_have_no_targets():
    _, made = corrupt([0, 30], 20)
    assert not made["mask"][0].any()
    assert made["mask"][1].any()


def test_load(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    source, task = Text(f"{tmp_path}/a.txt"), SpanCorruption(sequence_length=64)
    loaded = load(source, task, batch_size=4)
    assert loaded.facts.sequence_length == 64
    assert loaded.facts.start_token == loaded.tokenizer.pad
    batch = loaded.train[0]
    assert batch["inputs"].shape == (4, 64)
    assert batch["tokens"].shape == (4, corruption.lengths(0.15, 64)[1])
    assert (batch["tokens"][:, 0] == loaded.tokenizer.pad).all()
    assert "<extra_id_0>" in loaded.tokenizer.decode(batch["inputs"][0])
    with pytest.raises(ValueError, match=r"task.sequence_length is 2000: it needs 111 sentinels; 100 exist"):
        load(source, SpanCorruption(sequence_length=2000))
    train("bytes", []).save(tmp_path / "few.json")
    with pytest.raises(ValueError, match=r"needs the special tokens pad, sentinels, which .*few.json.* does not have"):
        load(source, task, TokenizerFile(str(tmp_path / "few.json")))
    with pytest.raises(ValueError, match=r"task.mask_rate is 1.0: it must be above 0 and below 1"):
        SpanCorruption(sequence_length=64, mask_rate=1.0)
    with pytest.raises(ValueError, match=r"task.sequence_length is 2: it must be 3 or more"):
        corruption.lengths(0.15, 2)
