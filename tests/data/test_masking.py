import numpy as np
import pytest
import tokenizers

from lineage.configs import schema
from lineage.data import Tokenizer, shuffle
from lineage.data.examples.encoded import ROLES
from lineage.data.examples.masking import PATTERNS, MaskPatches, MaskTokens
from lineage.data.sources.packages import Digits
from lineage.data.sources.text import Text
from lineage.data.tokenizers.kinds import Words
from lineage.tasks import TASKS
from lineage.tasks.masked_autoencoding import MaskedAutoencoding
from lineage.tasks.masked_lm import MaskedLM
from tests.data.conftest import load, train

WORDS = [f"w{i}" for i in range(50)]
CODER = train("words", [" ".join(WORDS)], ("end_of_text", "mask"))
END, MASK = CODER.end_of_text, CODER.mask


def windows(rows=400, length=40, seed=0):
    """Return windows without padding, each with an end of text, followed by two with padding and one of padding
    only.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, CODER.vocab_size, (rows, length)).astype(np.int32)
    tokens[:, 7] = END
    mask = np.ones(tokens.shape, bool)
    mask[-3:-1, 20:] = False
    mask[-1] = False
    return {"tokens": tokens, "targets": np.roll(tokens, -1), "mask": mask}


def masked(rate=0.15, seed=0, **options):
    batch = windows(**options)
    keys = np.random.default_rng(seed).integers(0, 2**63, len(batch["tokens"])).astype(np.uint64)
    return batch["tokens"], MaskTokens(rate, CODER)(batch, keys)


def test_only_selected_tokens_are_targets_and_others_are_unchanged():
    tokens, batch = masked()
    assert batch["masked_positions"].shape == batch["targets"].shape == batch["mask"].shape == (400, 6)
    assert batch["mask"][:-3].all()
    assert batch["mask"].sum(axis=1)[-3:].tolist() == [3, 3, 0]  # of 21, 21 and 0 tokens
    actual = np.take_along_axis(tokens, batch["masked_positions"], axis=1)
    np.testing.assert_array_equal(batch["targets"], actual)
    for row, (places, chosen) in enumerate(zip(batch["masked_positions"], batch["mask"])):
        assert len(set(places)) == 6
        others = np.setdiff1d(np.arange(40), places[chosen])
        np.testing.assert_array_equal(batch["tokens"][row, others], tokens[row, others])


def test_special_tokens_and_padding_are_never_selected():
    _, batch = masked()
    assert (batch["targets"][batch["mask"]] != END).all()
    assert batch["tokens_mask"].sum(axis=1)[[0, -3, -1]].tolist() == [40, 21, 0]
    rows, columns = np.nonzero(batch["mask"])
    assert batch["tokens_mask"][rows, batch["masked_positions"][rows, columns]].all()


def test_masking_rates():
    """Check that 15% of positions are selected uniformly, and that 80%, 10% and 10% of them are masked, random
    and unchanged, within 4 standard deviations.
    """
    _, batch = masked(rows=20_000)
    real, old = batch["mask"], batch["targets"]
    new = np.take_along_axis(batch["tokens"], batch["masked_positions"], axis=1)
    count = real.sum()
    assert count / (39 * 19_997) == pytest.approx(6 / 39, rel=1e-3)
    for share, where in ((0.8, new == MASK), (0.1 + 0.1 / CODER.vocab_size, new == old)):
        deviation = (share * (1 - share) / count) ** 0.5
        assert abs((where & real).sum() / count - share) < 4 * deviation
    random = new[real & (new != MASK) & (new != old)]
    assert len(np.unique(random)) == CODER.vocab_size - 1
    places = np.bincount(batch["masked_positions"][:-3].ravel(), minlength=40)
    assert places[7] == 0
    expected = 19_997 * 6 / 39
    assert (np.abs(np.delete(places, 7) - expected) < 5 * expected**0.5).all()


PIECES = ["one", "two ", "three words", "a", "rewritten", "unwritten"]
SUBWORDS = {
    "wordpiece": train("wordpiece", [" ".join(PIECES)], ("mask", "sep"), vocab_size=30),
    "unigram": train("unigram", [" ".join(PIECES * 3)], ("mask", "end_of_text"), vocab_size=32),
    "bpe": train("bpe", [" ".join(PIECES)], ("mask", "end_of_text"), vocab_size=270),
    "bpe_words": train("bpe_words", [" ".join(PIECES)], ("mask", "end_of_text"), vocab_size=30),
}


@pytest.mark.parametrize("kind", SUBWORDS)
def test_part_of_a_word_is_masked_if_no_word_fits(kind):
    """A batch without targets has the loss nan, which ended the run."""
    coder = SUBWORDS[kind]
    tokens = coder.encode("rewritten" * 8)[None, :16]
    keys, mask = np.arange(1, 9, dtype=np.uint64), MaskTokens(0.15, coder, whole_words=True)
    tokens = np.repeat(tokens, len(keys), axis=0).astype(np.int32)
    batch = mask.hide(tokens, np.ones(tokens.shape, bool), keys)
    assert (batch["mask"].sum(axis=1) == 2).all()
    assert not mask.hide(tokens, np.zeros(tokens.shape, bool), keys)["mask"].any()


@pytest.mark.parametrize("kind", SUBWORDS)
def test_whole_word_masking(kind):
    """Check that words are masked as a whole, with equal probability for words of equal length."""
    coder, rng = SUBWORDS[kind], np.random.default_rng(0)
    texts = [" ".join(rng.choice(["one", "two", "three", "words", "rewritten"], 40)) for _ in range(2000)]
    encoded = coder.encode_batch(texts)
    length = min(map(len, encoded))
    tokens = np.stack([row[:length] for row in encoded])
    tokens[:, 30] = coder.end_of_text
    real = np.ones(tokens.shape, bool)
    real[:2, 40:] = False
    batch = MaskTokens(0.15, coder, whole_words=True).hide(tokens, real, rng.integers(0, 2**63, 2000).astype(np.uint64))
    hidden = np.zeros(tokens.shape, bool)
    np.put_along_axis(hidden, batch["masked_positions"], batch["mask"], axis=1)
    assert not hidden[~real].any()
    assert not hidden[:, 30].any()
    wanted = np.rint(0.15 * real.sum(axis=1))
    assert (hidden.sum(axis=1) <= wanted).all()
    assert 0.95 < hidden.sum() / wanted.sum() <= 1
    counts = {}
    for row, row_hidden in zip(tokens[2:200], hidden[2:200]):
        decoded, words = [coder.decode([token]) for token in row], []
        for place, piece in enumerate(row):
            text = coder._backend.id_to_token(int(piece))
            before = coder._backend.id_to_token(int(row[place - 1])) if place else ""
            new = {
                "wordpiece": not text.startswith("##"),
                "unigram": text.startswith("\u2581"),
                "bpe": text.startswith("\u0120"),
                "bpe_words": before.endswith("</w>"),
            }[kind]
            if new or place in (0, 30, 31):
                words.append([])
            words[-1].append(place)
        for word in words[:-1]:
            assert len(set(row_hidden[word].tolist())) == 1, (decoded, word)
            total, times = counts.get(len(word), (0, 0))
            counts[len(word)] = total + 1, times + row_hidden[word[0]]
    rates = {size: times / total for size, (total, times) in counts.items() if total > 1000}
    assert all(0.1 < rate < 0.2 for rate in rates.values()), rates
    assert any(size > 1 for size in rates)


def test_masks_change_in_each_training_epoch_but_not_in_evaluation(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(WORDS * 20))
    task = MaskedLM(sequence_length=10, mask_rate=0.2)
    loaded = load(Text(f"{tmp_path}/a.txt"), task, Words(), batch_size=90, seed=1)
    assert loaded.tokenizer.special.sum() == 6
    first, second = loaded.train[0], loaded.train[1]
    assert first["targets"].shape == (90, 2)
    assert (first["masked_positions"] != second["masked_positions"]).any()
    for name, value in loaded.train[0].items():
        np.testing.assert_array_equal(value, first[name])
    evaluation = loaded.splits["validation"]
    for name, value in evaluation[0].items():
        np.testing.assert_array_equal(value, evaluation[0][name])


def test_windows_and_inputs_are_enclosed_as_the_tokenizer_does(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(WORDS * 20))
    backend = tokenizers.Tokenizer.from_str(train("words", WORDS, (*ROLES, "end_of_text")).to_str())
    cls, sep = map(backend.token_to_id, ("<s>", "</s>"))
    backend.post_processor = tokenizers.processors.BertProcessing(("</s>", sep), ("<s>", cls))
    task = MaskedLM(sequence_length=10)
    loaded = load(Text(f"{tmp_path}/a.txt"), task, Tokenizer(backend), batch_size=4)
    expected = np.array(backend.encode(" ".join(WORDS[:8])).ids)
    batches = loaded.splits["validation"]
    batch, last = batches[0], batches[len(batches) - 1]
    assert (batch["tokens"][:, [0, 9]] == [cls, sep]).all()
    assert batch["tokens_mask"].all()
    assert not np.isin(batch["targets"][batch["mask"]], [cls, sep]).any()
    sizes = last["tokens_mask"].sum(axis=1)
    assert [row[size - 1] for row, size in zip(last["tokens"], sizes) if size] == [sep]  # one example and padding
    inputs = task.input_examples([" ".join(WORDS[:8])], loaded.tokenizer, loaded.facts).source
    np.testing.assert_array_equal(inputs.take(np.array([0]))["tokens"], expected[None])


def test_masking_needs_a_mask_token():
    with pytest.raises(ValueError, match="needs a tokenizer with a mask token"):
        MaskTokens(0.15, train("bytes", []))


def patches(kind="random", rate=0.75, rows=6, columns=8, count=50, seed=0):
    """Return the masks [N, rows, columns], True for masked patches, of N images."""
    images, keys = np.zeros((count, 2 * rows, 2 * columns, 1)), shuffle.keys(np.arange(count), seed)
    noise = MaskPatches(lambda batch, keys: batch, 2, rate, kind)({"image": images}, keys)["noise"]
    np.testing.assert_array_equal(np.sort(noise), np.tile(np.arange(rows * columns), (count, 1)))
    return (noise >= int(rows * columns * (1 - rate))).reshape(count, rows, columns)


@pytest.mark.parametrize("kind", PATTERNS)
def test_number_of_masked_patches_and_variation_between_images(kind):
    for rate in (0.4, 0.75, 0.9):
        hidden = patches(kind, rate, rows=5)
        assert set(hidden.sum(axis=(1, 2))) == {40 - int(40 * (1 - rate))}
        assert len(np.unique(hidden.reshape(50, -1), axis=0)) >= (4 if kind == "grid" else 20)
    np.testing.assert_array_equal(patches(kind), patches(kind))
    assert (patches(kind, seed=1) != patches(kind)).any()


def test_block_masks_are_contiguous_unlike_random_masks():
    share = {}
    for kind in ("random", "block"):
        hidden = patches(kind, 0.5, 14, 14)
        share[kind] = (hidden[:, 1:] & hidden[:, :-1]).sum() / hidden[:, 1:].sum()
    assert share["random"] < 0.55
    assert share["block"] > 0.75


def test_grid_mask_keeps_one_patch_of_each_2x2_cell():
    hidden = patches("grid")
    cells = ~hidden.reshape(50, 3, 2, 4, 2)
    np.testing.assert_array_equal(cells.sum(axis=(2, 4)), 1)
    np.testing.assert_array_equal(cells.any(axis=(1, 3)).sum(axis=(1, 2)), 1)  # at the same position in each cell


@pytest.mark.parametrize("size", [7, 64])
def test_evaluation_masks_do_not_depend_on_the_batch(size):
    task = MaskedAutoencoding(mask_rate=0.75, patch_size=2)
    loaded = load(Digits(), task, batch_size=8, evaluation_batch_size=size)
    test = loaded.splits["test"]
    noise = np.concatenate([batch["noise"] for batch in test])[:100]
    keys = shuffle.keys(np.arange(100), 0)
    expected = MaskPatches(lambda batch, keys: batch, 2, 0.75)({"image": np.zeros((100, 8, 8, 1))}, keys)["noise"]
    np.testing.assert_array_equal(noise, expected)
    assert noise.dtype == np.int32
    # In training, the mask of an image changes in each epoch.
    epoch = loaded.train.examples_per_epoch
    first = [loaded.train[step] for step in range(2 * epoch // 8 + 1)]
    images = np.concatenate([batch["image"] for batch in first]).reshape(-1, 64)
    noise = np.concatenate([batch["noise"] for batch in first])
    again = np.flatnonzero((images[epoch:] == images[0]).all(axis=1))[0] + epoch
    assert (noise[again] != noise[0]).any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("masked_autoencoding", {"mask_rate": 1.0}, "task.mask_rate is 1.0: it must be above 0 and below 1"),
        ("masked_autoencoding", {"masking": "stripes"}, "task.masking is 'stripes'. Available: random, block, grid"),
        ("masked_autoencoding", {"patch_size": 0}, "task.patch_size is 0: it must be 1 or more"),
        ("image_classification", {"mask_rate": 0.5}, "ImageClassification has no key 'mask_rate'"),
    ],
)
def test_invalid_image_masking_section_raises(name, options, message):
    with pytest.raises(ValueError, match=message):
        schema.build(TASKS, schema.section(TASKS, name, **options))
