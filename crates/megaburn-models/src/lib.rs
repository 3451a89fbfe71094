//! Models that read like their papers: Llama.
