//! Corpora, tokenizers and samplers: (seed, sample index) -> tokens.
