"""Tokenizers: bytes, characters, words and four kinds of subwords, all in the format of the `tokenizers` library."""

from lineage.data.tokenizers.kinds import BPE, TOKENIZERS, Bytes, TokenizerFile, TokenizerKind, find_tokenizer
from lineage.data.tokenizers.tokenizer import FILE, SPECIAL, Tokenizer

TOKENIZERS.base = TokenizerKind
