"""Settings of text generation and of classes in a folder in the layout of `transformers`."""

import json

import pytest
import transformers

from lineage.models.convert import companions


def test_end_tokens_are_integers(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, "3"]}')
    with pytest.raises(ValueError, match=f"^{tmp_path}: eos_token_id has 3: it must have integers"):
        companions.end_tokens(tmp_path)


def test_excluded_tokens(tmp_path):
    path = tmp_path / "config.json"
    for words, expected in ((None, ()), ([[7], [2]], (7,))):  # the end is not excluded, as in `transformers`
        path.write_text(json.dumps({"eos_token_id": 2, "bad_words_ids": words}))
        assert companions.excluded_tokens(tmp_path) == expected
    for words in ([[1, 2]], [1], "1", [["1"]]):
        path.write_text(json.dumps({"bad_words_ids": words}))
        with pytest.raises(ValueError, match=f"^{tmp_path}: bad_words_ids is .*: it must be a list of lists of one"):
            companions.excluded_tokens(tmp_path)


def test_fields_for_generation_in_their_own_file(tmp_path):
    """Check that they override those of `config.json`, to which `transformers` 5 does not write most of them."""
    about = {"eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(about))
    fields = {"eos_token_id": [2, 5], "bad_words_ids": [[1], [7]], "decoder_start_token_id": 1}
    transformers.GenerationConfig(**fields).save_pretrained(tmp_path)
    assert companions.end_tokens(tmp_path) == (2, 5)
    assert companions.excluded_tokens(tmp_path) == (1, 7)
    assert companions.start_role(tmp_path) == "pad"


@pytest.mark.parametrize(("start", "role"), [(1, "pad"), (2, "end_of_text"), (None, "end_of_text")])
def test_first_token_of_decoders(start, role, tmp_path):
    about = {"decoder_start_token_id": start, "pad_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert companions.start_role(tmp_path) == role


def test_other_first_token_of_decoders_raises(tmp_path):
    about = {"decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="decoder_start_token_id is 0: it must be pad_token_id or eos_token_id"):
        companions.start_role(tmp_path)


@pytest.mark.parametrize("about", [{"num_labels": 1}, {"id2label": {"0": "spam"}}, {"num_labels": 1, "id2label": None}])
def test_one_class_has_its_own_probability(about, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert companions.is_multi_label(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(about | {"num_labels": 2, "id2label": None}))
    assert not companions.is_multi_label(tmp_path)
