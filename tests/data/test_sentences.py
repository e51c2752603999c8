import re

import cloudpickle
import numpy as np
import pytest

from lineage.data import Documents, shuffle
from lineage.data.examples.masking import MaskTokens
from lineage.data.examples.windows import Chunks, PairSentences, Sentences
from lineage.data.sources import SOURCES
from lineage.data.sources.text import Text
from lineage.data.tokenizers.kinds import TokenizerFile, WordPiece, Words
from lineage.data.tokens import tokenize
from lineage.tasks.masked_lm import SentencePairPretraining
from tests.data.conftest import load, train

LENGTH = 24
ROLES = ("pad", "cls", "sep", "mask", "end_of_text")


def corpus(documents=30, seed=0):
    """Return documents of numbered words: "d3s7w1" is word 1 of sentence 7 of document 3."""
    rng = np.random.default_rng(seed)
    return [
        "\n".join(" ".join(f"d{d}s{s}w{w}" for w in range(rng.integers(1, 9))) for s in range(rng.integers(1, 30)))
        for d in range(documents)
    ]


@pytest.fixture(scope="module")
def chunks():
    texts = Sentences(Documents(corpus()))
    coder = train("words", texts, ROLES)
    return Chunks(tokenize(texts, coder), LENGTH), coder


def read(coder, tokens):
    """Return (document, sentence, word) of each token."""
    words = coder.decode(tokens).split()
    return [tuple(map(int, word[1:].replace("s", " ").replace("w", " ").split())) for word in words]


def begins(chunks, coder):
    """Return (document, sentence, word) of the first word of each sentence."""
    return read(coder, chunks.tokens[chunks.starts])


def pairs(chunks, coder, order=False, seed=0, rounds=1):
    """Return the examples with the masking undone."""
    masked = MaskTokens(0.15, coder)
    firsts = np.tile(chunks.firsts, rounds)
    batch = {"first": firsts, "chunks": [chunks] * len(firsts), "mask": np.ones(len(firsts), bool)}
    examples = PairSentences(LENGTH, coder, masked, order)(batch, shuffle.keys(np.arange(len(firsts)), seed))
    hidden = examples["tokens"].copy()
    np.put_along_axis(hidden, examples["masked_positions"], examples["targets"], axis=1)  # restore the masked tokens
    return firsts, examples | {"tokens": hidden}


def test_sentences_end_at_lines_and_punctuation():
    texts = ["One. Two!  Three?\nfour 5.6\n\n  \nlast", "", "x.y"]
    sentences = list(Sentences(Documents(texts)))
    assert sentences == ["One.", " Two!", "  Three?\n", "four 5.6\n", "last", "", "", "x.y", ""]


def test_chunks_start_at_sentences_and_cover_each_document(chunks):
    chunks, coder = chunks
    everything = read(coder, np.concatenate([chunks.read(s, 1) for s in range(len(chunks.starts))]))
    words = " ".join(corpus()).split()
    assert coder.decode(np.concatenate([chunks.read(s, 1) for s in range(len(chunks.starts))])).split() == words
    assert everything == sorted(everything)
    seen = set()
    for index in range(len(chunks)):
        first = int(chunks[index]["first"])
        assert chunks.take(np.array([index]))["first"] == first
        count = max(chunks.num_fitting(first, LENGTH), 2)
        actual = read(coder, chunks.read(first, count))
        assert len({d for d, _, _ in actual}) == 1
        assert actual[0][2] == 0
        if first + count < chunks.stops[first]:
            assert len(chunks.read(first, count + 1)) > LENGTH
        assert not seen & set(actual)
        seen.update(actual)
    last = {d: s for d, s, _ in everything}
    assert {(d, s) for d, s, _ in set(everything) - seen} <= set(last.items())
    assert len(seen) > 0.9 * len(everything)


def test_second_sentence_follows_the_first_or_is_from_another_document(chunks):
    chunks, coder = chunks
    firsts, batch = pairs(chunks, coder, rounds=200)
    count = len(firsts)
    assert abs(batch["label"].mean() - 0.5) < 4 * 0.5 / count**0.5
    others, short, begun = [], 0, begins(chunks, coder)
    lasts = set(read(coder, chunks.tokens[chunks.starts + chunks.lengths - 1]))
    for row in range(1000):
        tokens, real = batch["tokens"][row], batch["tokens_mask"][row]
        size = real.sum()
        assert real[:size].all()
        assert (tokens[size:] == coder.pad).all()
        middle, last = np.flatnonzero(tokens == coder.sep)
        assert tokens[0] == coder.cls
        assert last == size - 1
        assert batch["segments"][row].tolist() == [0] * (middle + 1) + [1] * (last - middle) + [0] * (len(real) - size)
        a, b = read(coder, tokens[1:middle]), read(coder, tokens[middle + 1 : last])
        assert min(len(a), len(b)) > 0
        assert a[0][0] == a[-1][0] == begun[firsts[row]][0]
        if batch["label"][row]:
            assert a[0][0] != b[0][0]
            others.append(b[0])
        else:
            assert (a[-1][0], a[-1][1] + 1, 0) == b[0]  # one sentence ends and the next one begins
        assert b[0][2] == 0
        assert a[-1] in lasts
        assert len(a) + len(b) <= LENGTH
        short += len(a) + len(b) < LENGTH / 2
    assert len({d for d, _, _ in others}) == 30
    assert 0.02 < short / 1000 < 0.3


def test_negative_sentences_are_uniform_over_other_documents(chunks):
    """Check that each of the S - s sentences of other documents is equally frequent."""
    chunks, coder = chunks
    firsts = np.full(10_000, chunks.firsts[5])
    pair = PairSentences(LENGTH, coder, MaskTokens(0.15, coder))
    draws = np.random.default_rng(0).integers(0, 2**63, (len(firsts), 4))
    begun = [read(coder, pair._pair(chunks, int(firsts[0]), True, *map(int, draw))[1][:1])[0] for draw in draws]
    own = begins(chunks, coder)[firsts[0]][0]
    others = [word for word in begins(chunks, coder) if word[0] != own]
    counts = np.array([begun.count(word) for word in others])
    assert counts.sum() == len(begun)
    expected = len(begun) / len(others)
    assert (np.abs(counts - expected) < 5 * expected**0.5).all()


def test_sentences_are_swapped_in_half_of_the_examples(chunks):
    chunks, coder = chunks
    firsts, batch = pairs(chunks, coder, order=True, rounds=200)
    assert abs(batch["label"].mean() - 0.5) < 4 * 0.5 / len(firsts) ** 0.5
    for row in range(500):
        middle, last = np.flatnonzero(batch["tokens"][row] == coder.sep)
        a, b = (read(coder, batch["tokens"][row, part]) for part in (slice(1, middle), slice(middle + 1, last)))
        assert a[0][0] == b[0][0]
        assert (a > b) == bool(batch["label"][row])


def test_pairs_change_in_each_epoch_but_not_in_evaluation(tmp_path):
    for number, document in enumerate(corpus(40)):
        (tmp_path / f"{number:02}.txt").write_text(document)
    task = SentencePairPretraining(sequence_length=32, pairing="next_sentence", whole_words=True)
    what, options = (Text(str(tmp_path)), task, WordPiece(60)), {"batch_size": 16, "seed": 1}
    loaded = load(*what, **options)
    first, again = loaded.train[3], load(*what, **options)
    shapes = {name: value.shape for name, value in first.items()}
    assert shapes == {
        **dict.fromkeys(("tokens", "tokens_mask", "segments"), (16, 32)),
        **dict.fromkeys(("masked_positions", "targets", "mask"), (16, 5)),
        "label": (16,),
    }
    copied = cloudpickle.loads(cloudpickle.dumps(loaded.train))
    parts = [load(*what, **options, process_index=i, process_count=2) for i in range(2)]
    for name, value in first.items():
        np.testing.assert_array_equal(copied[3][name], value)
        np.testing.assert_array_equal(np.concatenate([part.train[3][name] for part in parts]), value)
        np.testing.assert_array_equal(again.splits["validation"][0][name], loaded.splits["validation"][0][name])
    last = list(loaded.splits["validation"])[-1]
    rows = len(loaded.splits["validation"].source) % 16
    assert last["tokens_mask"][:, 0].tolist() == [True] * rows + [False] * (16 - rows)
    assert not last["mask"][rows:].any()


def test_data_without_pairs_raise(tmp_path):
    one, flat = tmp_path / "one.txt", tmp_path / "flat"
    one.write_text("a b\nc d\n" * 20)
    flat.mkdir()
    for number in range(20):
        (flat / str(number)).write_text(f"only {number}")
    single, several = (Text(str(path), validation_fraction=0.0) for path in (one, flat))
    following = SentencePairPretraining(sequence_length=16, pairing="next_sentence")
    order = SentencePairPretraining(sequence_length=16, pairing="sentence_order")
    with pytest.raises(ValueError, match="Next-sentence prediction needs several documents in each split"):
        load(single, following, Words())
    assert load(single, order, Words(), batch_size=2).train[0]["label"].shape == (2,)
    with pytest.raises(ValueError, match="Pairs of sentences need texts of at least two sentences: there is none"):
        load(several, following, Words())
    with pytest.raises(ValueError, match=r"task.sequence_length is 4: it must be 5 or more"):
        load(single, SentencePairPretraining(sequence_length=4, pairing="sentence_order"), Words())
    train("words", ["a b c"], ("end_of_text", "mask")).save(tmp_path / "few.json")
    with pytest.raises(ValueError, match=r"needs the special tokens pad, cls, sep, which .*few.json.* does not have"):
        load(single, order, TokenizerFile(str(tmp_path / "few.json")))


def test_pairs_of_a_mixture_are_read_from_their_own_source(tmp_path):
    for name, count in (("a", 30), ("b", 10)):
        (tmp_path / name).mkdir()
        for number, document in enumerate(corpus(count)):
            (tmp_path / name / f"{number:02}.txt").write_text(re.sub(r"d\d+s\d+", name, document))
    parts = [{"source": f"text:{tmp_path}/{name}", "name": name, "validation_fraction": 0.3} for name in "ab"]
    task = SentencePairPretraining(sequence_length=24, pairing="next_sentence")
    loaded = load(SOURCES.build("mixture", parts=tuple(parts), weights=(1, 1)), task, Words(), batch_size=8)

    def letters(batch):
        tokens = batch["tokens"].copy()
        np.put_along_axis(tokens, batch["masked_positions"], batch["targets"], axis=1)  # restore the masked tokens
        texts = [loaded.tokenizer.decode(row[real]) for row, real in zip(tokens, batch["tokens_mask"])]
        return ["".join(sorted({word[0] for word in re.findall(r"[ab]w\d", text)})) for text in texts]

    for step in range(4):
        assert sorted(letters(loaded.train[step])) == [*"aaaabbbb"]
    for name in "ab":
        assert {*letters(loaded.splits[f"validation_{name}"][0])} - {""} == {name}


def test_pairs_of_cached_texts_are_those_of_texts_in_memory(tmp_path):
    """The cache keeps the tokenizer and the tokens of sentences only if their documents are unchanged."""
    (tmp_path / "texts").mkdir()
    for number, document in enumerate(corpus(20)):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(document)
    settings = {"sequence_length": 32, "pairing": "next_sentence"}
    what, options = (Text(str(tmp_path / "texts")), WordPiece(60)), {"batch_size": 8, "seed": 1}
    expected = load(what[0], SentencePairPretraining(**settings), what[1], **options).train[0]
    task = SentencePairPretraining(**settings, cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        cached = load(what[0], task, what[1], **options).train[0]
        for name, value in expected.items():
            np.testing.assert_array_equal(cached[name], value)
    passes = [corpus(29), corpus(30)]
    changing = Sentences(Documents(lambda: iter(passes.pop())))
    with pytest.raises(ValueError, match="the texts of documents differ between two passes"):
        tokenize(changing, train("words", corpus()), tmp_path / "changing")
