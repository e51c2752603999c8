"""Tokenizers: bytes, characters, words and four kinds of subwords, all in the format of the `tokenizers` library."""

from lineage.data.tokenizers.kinds import (
    BPE,
    TOKENIZERS,
    Bytes,
    Characters,
    TokenizerFile,
    TokenizerKind,
    Unigram,
    WordBPE,
    WordPiece,
    Words,
    find_tokenizer,
)
from lineage.data.tokenizers.tokenizer import FILE, SENTINELS, SPECIAL, Tokenizer
