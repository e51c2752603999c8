"""BERTScore matches the bert-score package, and MoverScore its authors' definition, with random weights and texts."""

import json
import math
import shutil
import string
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from bert_score import BERTScorer
from scipy.optimize import linprog
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from lineage.evaluation.encoder import Encoder
from lineage.metrics.embedding import Embedded, bert_score, mover_score, read_baseline
from tests.tiers import tiered

WORDS = ["the", "a", "cat", "cats", "dog", "sat", "sitting", "on", "mat", ".", ",", "ran", "running", "\u00e9t\u00e9"]
FAMILIES = {
    "bert": (transformers.BertConfig, transformers.BertModel, ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]),
    "roberta": (transformers.RobertaConfig, transformers.RobertaModel, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
}


def sentences(seed, count):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(2, 20))) for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Save a checkpoint with random weights and its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    config, model, special = FAMILIES[request.param]
    if request.param == "bert":
        coder = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        coder.normalizer, coder.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False)
        wrapper = transformers.BertTokenizerFast
    else:
        coder = Tokenizer(models.BPE())
        coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        settings = {"vocab_size": 290, "initial_alphabet": alphabet, "show_progress": False}
        trainer, wrapper = trainers.BpeTrainer(special_tokens=special, **settings), transformers.RobertaTokenizerFast
    coder.train_from_iterator(sentences(0, 100), trainer)
    ends = [(name, coder.token_to_id(name)) for name in (special[0], special[2])]
    coder.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A {special[2]}", special_tokens=ends)
    # The RoBERTa tokenizer adds the leading space that bert-score expects only if this option is set.
    wrapper(tokenizer_object=coder, model_max_length=24, add_prefix_space=True).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40}
    room = 24 if request.param == "bert" else 26
    places = {"vocab_size": coder.get_vocab_size(), "max_position_embeddings": room, "pad_token_id": 1}
    reference = model(config(**sizes, **places, initializer_range=0.3))
    reference.save_pretrained(folder)
    return folder


def scorer_of(folder, layer, **options):
    scorer = BERTScorer(str(folder), num_layers=layer, device="cpu", nthreads=0, **options)
    coder = scorer._tokenizer

    def build_inputs_with_special_tokens(ids):
        return [coder.cls_token_id, *ids, coder.sep_token_id]

    # A method that bert-score calls for empty sentences and that this version of transformers no longer has.
    coder.build_inputs_with_special_tokens = build_inputs_with_special_tokens
    return scorer


@cache
def encoder_of(folder, layer):
    return Encoder(folder, layer, batch_size=16)


def test_bert_score_matches_bert_score_package(folder):
    candidates, references = sentences(1, 30), sentences(2, 30)
    candidates[3], references[3:6] = candidates[4], ["", "cat", candidates[5]]
    candidates[7] = "  "
    # One pair at a time, so that there is no padding.
    theirs = scorer_of(folder, 2).score(candidates, references, batch_size=1)
    ours = bert_score(candidates, references, encoder_of(folder, 2))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.ptp(ours.f) > 0.3
    np.testing.assert_array_equal(np.stack(ours)[:, [3, 7]], 0)
    assert ours.f[5] == pytest.approx(1)


@pytest.mark.parametrize("folder", ["bert"], indirect=True)
def test_settings_of_the_tokenizer_are_used(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": False}))
    candidates = [text.title() for text in sentences(1, 10)]
    theirs = scorer_of(tmp_path, 2).score(candidates, sentences(2, 10), batch_size=1)
    ours = bert_score(candidates, sentences(2, 10), Encoder(tmp_path, 2, batch_size=16))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # computed by bert-score
def test_rarity_baseline_and_several_references(folder, tmp_path):
    candidates, flat = sentences(3, 8), sentences(4, 16)
    counts = [1, 3, 2, 1, 4, 2, 1, 2]
    groups = [flat[sum(counts[:i]) :][:count] for i, count in enumerate(counts)]
    path = tmp_path / "baseline.tsv"
    path.write_text("LAYER,P,R,F\n0,0.1,0.2,0.3\n1,0.4,0.5,0.6\n2,0.31,0.32,0.33\n")
    options = {"rescale_with_baseline": True, "lang": "en", "baseline_path": str(path), "idf": True, "idf_sents": flat}
    theirs = scorer_of(folder, 2, **options).score(candidates, groups, batch_size=1)
    ours = bert_score(candidates, groups, encoder_of(folder, 2), idf=True, baseline=read_baseline(path, 2))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    with pytest.raises(ValueError, match="has no layer 3: it has 0, 1, 2"):
        read_baseline(path, 3)
    path.write_text("0,0.1,0.2,0.3\n1,0.1,0.2,0.3\n")
    with pytest.raises(ValueError, match="is not a baseline file: it must be CSV with the header LAYER,P,R,F"):
        read_baseline(path, 0)


def hidden_states(folder, texts):
    """Return the tokens, ids and hidden states [L, T, D] of each text, computed by `transformers`."""
    coder, model = (kind.from_pretrained(folder) for kind in (transformers.AutoTokenizer, transformers.AutoModel))
    for text in texts:
        ids = coder.encode(text, truncation=True, max_length=24)
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        yield coder.convert_ids_to_tokens(ids), ids, torch.stack(hidden)[:, 0].double().numpy()


def transported(a, b, costs):
    """Return the earth mover's distance as the authors' code computes it: the cheapest flow of the smaller mass, plus
    the
    largest cost for the remainder of the other."""
    ours, theirs = costs[: len(a), len(a) :].shape
    rows, columns = np.kron(np.eye(ours), np.ones(theirs)), np.kron(np.ones(ours), np.eye(theirs))
    least = min(a.sum(), b.sum())
    limits = {"A_ub": np.vstack([rows, columns]), "b_ub": np.concatenate([a, b]) + 1e-12}
    flow = linprog(costs[: len(a), len(a) :].ravel(), **limits, A_eq=np.ones((1, ours * theirs)), b_eq=[least])
    return flow.fun + costs.max() * abs(a.sum() - b.sum())


def authors_score(folder, candidates, references, version, size, stop_words):
    """Compute equations 1 to 4 of the paper as in moverscore.py and moverscore_v2.py, including their epsilons."""
    sides = []
    for texts in (references, candidates):
        found = list(hidden_states(folder, texts))
        counts = Counter(id for _, ids, _ in found for id in set(ids))
        side = []
        for tokens, ids, layers in found:
            idf = np.array([math.log((len(texts) + 1) / (counts[id] + 1)) for id in ids])
            if version == 1:
                layers = layers[1:] / np.linalg.norm(layers[1:], axis=-1, keepdims=True)
                vectors = np.concatenate([layers.min(0), layers.mean(0), layers.max(0)], axis=-1)
            else:
                vectors = layers[-1]
            left_out = {*string.punctuation, *stop_words}
            kept = [n for n, token in enumerate(tokens) if token not in left_out and "##" not in token]
            width = size if version == 1 and len(kept) >= size else 1 if version == 2 else len(kept)
            grams = [kept[start : start + width] for start in range(len(kept) - width + 1)]
            scales = [idf[gram] / (idf[gram].sum() + 1e-5) for gram in grams]
            means = np.array([scale @ vectors[gram] for scale, gram in zip(scales, grams)])
            side.append((means, np.array([idf[gram].sum() for gram in grams])))
        sides.append(side)
    scores = []
    for (theirs, b), (ours, a) in zip(*sides):
        points = np.concatenate([theirs, ours])
        points = points / (np.linalg.norm(points, axis=-1, keepdims=True) + 1e-6)
        costs = ((points[:, None] - points[None]) ** 2).sum(axis=-1)
        small = 1e-5 if version == 1 else 1e-30
        masses = b / (b.sum() + small), a / (a.sum() + small)
        distance = transported(*masses, costs if version == 1 else costs**0.5)
        scores.append(1 - distance if version == 1 else 1 / (1 + distance))
    return np.array(scores)


@pytest.fixture(scope="module")
def moving():
    """Return sentences with many weighted tokens, so that the authors' epsilons are negligible."""
    random = np.random.default_rng(5)
    candidates, references = ([" ".join(random.choice(WORDS, 14)) for _ in range(6)] for _ in range(2))
    return candidates, references


@tiered(("version", "size"), [(1, 1), (1, 2), (2, 1)], first=lambda version, size: size == 1)
def test_mover_score_matches_the_authors_code(folder, moving, version, size):
    if folder.name.startswith("roberta"):
        pytest.skip("the authors' programs know the tokens of BERT alone")
    encoder = encoder_of(folder, range(-3, 0) if version == 1 else -1)
    options = {"version": version, "size": size, "skip": encoder.skip(["the"])}
    ours = mover_score(*moving, encoder, **options)
    np.testing.assert_allclose(ours, authors_score(folder, *moving, version, size, ["the"]), atol=1e-5)
    assert np.ptp(ours) > 0.02


def one_hot(texts):
    """Embed letters as one-hot vectors, which have equal distances."""
    found = []
    for text in texts:
        ids = np.array([26, *(ord(letter) - ord("a") for letter in text), 27])
        found.append(Embedded(ids, np.eye(28, dtype=np.float32)[ids]))
    return found


def test_mover_score_matches_worked_examples():
    """Check that the distance, without [CLS] and [SEP], is the fraction of letters that move, times sqrt(2) or 2."""
    options = {"idf": False, "skip": {26, 27}}
    np.testing.assert_allclose(mover_score(["abc", "ab"], ["abd", "ab"], one_hot, **options), [1 - 2 / 3, 1])
    second = mover_score(["abc", "abc"], ["abd", ["abc", "xyz"]], one_hot, version=2, **options)
    np.testing.assert_allclose(second, [1 / (1 + 2**0.5 / 3), (1 + 1 / (1 + 2**0.5)) / 2])
    np.testing.assert_allclose(mover_score(["", "a"], ["a", "b"], one_hot, **options), [0, -1])
    costs, scale = 2.0 * (np.array(list("abc"))[:, None] != np.array(list("abd"))), np.ones(3)
    kernel = np.exp(-costs / 0.7)
    for _ in range(100):  # Sinkhorn iterations: normalize rows and columns of the plan in turn
        other = 1 / 3 / (scale @ kernel)
        scale = 1 / 3 / (kernel @ other)
    entropic = mover_score(["abc"], ["abd"], one_hot, entropy=0.7, **options)
    np.testing.assert_allclose(entropic, 1 - (scale[:, None] * kernel * other * costs).sum(), atol=1e-6)
    precision, recall, f = bert_score(["abcd"], ["ab"], one_hot)
    np.testing.assert_allclose([precision, recall, f], [[0.5], [1], [2 / 3]], rtol=1e-6)


def test_scores_do_not_depend_on_other_pairs():
    """Check that padding and other pairs do not change a score, and that `embed` receives every text once."""
    asked = []

    def embed(texts):
        asked.append(texts)
        return [Embedded(ids, -1.0 - vectors) if "z" in text else Embedded(ids, 1 + vectors)
                for text, (ids, vectors) in zip(texts, one_hot(texts))]  # fmt: skip

    alone = bert_score(["abc"], ["za"], embed)
    among = bert_score(["abc", "abc", "a"], ["za", "abcdefghijklmnopqrstuvwxy", "abc"], embed)
    assert alone.f[0] == pytest.approx(among.f[0])
    assert alone.f[0] < 0
    assert [sorted(texts) for texts in asked] == [["abc", "za"], ["a", "abc", "abcdefghijklmnopqrstuvwxy", "za"]]


@pytest.mark.parametrize("score", [bert_score, mover_score])
def test_invalid_inputs_raise(score):
    with pytest.raises(ValueError, match="2 outputs and 1 references"):
        score(["a", "b"], ["a"], one_hot)
    with pytest.raises(ValueError, match="0 outputs and 0 references"):
        score([], [], one_hot)
    with pytest.raises(ValueError, match="Output 1 has no reference"):
        score(["a", "b"], ["a", []], one_hot)
    with pytest.raises(ValueError, match="idf needs at least 2"):
        score(["a"], ["a"], one_hot, idf=True)


def test_mover_score_invalid_inputs_raise():
    for options in ({"version": 1, "size": 0}, {"entropy": -1.0}):
        with pytest.raises(ValueError, match="must be 1 or 2, at least 1, and at least 0"):
            mover_score(["a"], ["a"], one_hot, idf=False, **options)


def test_roberta_texts_get_a_leading_space(folder, tmp_path):
    """Check that a space is prepended, as in bert-score, whatever the tokenizer file sets."""
    texts = ["cat sat", " the dog ", ""]
    copy = shutil.copytree(folder, tmp_path / "copy")
    told = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(told.replace('"add_prefix_space": true', '"add_prefix_space": false'))
    assert folder.name.startswith("bert") or (copy / "tokenizer.json").read_text() != told
    ids, others = ([text.ids.tolist() for text in coder(texts)] for coder in (encoder_of(folder, 2), Encoder(copy, 0)))
    assert ids == others
    assert [len(row) for row in ids[2:]] == [2]


def test_invalid_encoders_raise(folder):
    with pytest.raises(ValueError, match=r"layer is 4: the model has 0 \(the embeddings\) to 3"):
        Encoder(folder, 4)
    with pytest.raises(ValueError, match=r"layer is range\(-5, 0\)"):
        Encoder(folder, range(-5, 0))
