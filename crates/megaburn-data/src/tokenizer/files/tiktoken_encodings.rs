/// How the texts of a kind of rank file are divided, and its special tokens.
#[derive(Debug)]
pub(super) struct Encoding {
    /// The name, which is also that of its file, without the ending.
    pub(super) name: &'static str,
    /// The `tokenizer_class` of `tokenizer_config.json` that have it.
    pub(super) classes: &'static [&'static str],
    /// The `model_type` of `config.json` that have it.
    pub(super) models: &'static [&'static str],
    /// The number of ranks of its published file.
    pub(super) num_ranks: usize,
    /// The parts that a text is divided into.
    pub(super) pattern: &'static str,
    /// The tokens that start and end a text; empty if there is none.
    pub(super) bos: &'static str,
    pub(super) eos: &'static str,
    /// Special tokens with their ids.
    fixed: &'static [(&'static str, u32)],
    /// Further special tokens, whose names end with numbers: start of the name, the first number,
    /// the first id, how many.
    numbered: &'static [(&'static str, u32, u32, u32)],
}

const ENDOFTEXT: &str = "<|endoftext|>";
/// Source: tiktoken `tiktoken_ext/openai_public.py`.
const CL100K: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s";
/// Source: tiktoken `tiktoken_ext/openai_public.py`.
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Source: tiktoken `tiktoken_ext/openai_public.py`.
const R50K: &str =
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s";
/// Source: Llama 3 `llama/tokenizer.py`.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Source: Qwen `tokenization_qwen.py`.
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// All encodings that are known.
pub(super) static ENCODINGS: [Encoding; 7] = [
    Encoding {
        name: "llama3",
        classes: &[],
        models: &["llama"],
        num_ranks: 128_000,
        pattern: LLAMA3,
        bos: "<|begin_of_text|>",
        eos: "<|end_of_text|>",
        fixed: &[
            ("<|begin_of_text|>", 128_000),
            ("<|end_of_text|>", 128_001),
            ("<|start_header_id|>", 128_006),
            ("<|end_header_id|>", 128_007),
            ("<|eot_id|>", 128_009),
        ],
        numbered: &[
            ("<|reserved_special_token_", 0, 128_002, 4),
            ("<|reserved_special_token_", 4, 128_008, 1),
            ("<|reserved_special_token_", 5, 128_010, 246),
        ],
    },
    Encoding {
        name: "cl100k_base",
        classes: &[],
        models: &[],
        num_ranks: 100_256,
        pattern: CL100K,
        bos: "",
        eos: ENDOFTEXT,
        fixed: &[
            (ENDOFTEXT, 100_257),
            ("<|fim_prefix|>", 100_258),
            ("<|fim_middle|>", 100_259),
            ("<|fim_suffix|>", 100_260),
            ("<|endofprompt|>", 100_276),
        ],
        numbered: &[],
    },
    Encoding {
        name: "o200k_base",
        classes: &[],
        models: &[],
        num_ranks: 199_998,
        pattern: O200K,
        bos: "",
        eos: ENDOFTEXT,
        fixed: &[(ENDOFTEXT, 199_999), ("<|endofprompt|>", 200_018)],
        numbered: &[],
    },
    Encoding {
        name: "o200k_harmony",
        classes: &[],
        models: &["gpt_oss"],
        num_ranks: 199_998,
        pattern: O200K,
        bos: "<|startoftext|>",
        eos: ENDOFTEXT,
        fixed: &[
            ("<|startoftext|>", 199_998),
            (ENDOFTEXT, 199_999),
            ("<|return|>", 200_002),
            ("<|constrain|>", 200_003),
            ("<|channel|>", 200_005),
            ("<|start|>", 200_006),
            ("<|end|>", 200_007),
            ("<|message|>", 200_008),
            ("<|call|>", 200_012),
        ],
        numbered: &[
            ("<|reserved_", 200_000, 200_000, 2),
            ("<|reserved_", 200_004, 200_004, 1),
            ("<|reserved_", 200_009, 200_009, 3),
            ("<|reserved_", 200_013, 200_013, 1_075),
        ],
    },
    Encoding {
        name: "qwen",
        classes: &["QWenTokenizer"],
        models: &["qwen"],
        num_ranks: 151_643,
        pattern: QWEN,
        bos: "",
        eos: ENDOFTEXT,
        fixed: &[
            (ENDOFTEXT, 151_643),
            ("<|im_start|>", 151_644),
            ("<|im_end|>", 151_645),
        ],
        numbered: &[("<|extra_", 0, 151_646, 205)],
    },
    Encoding {
        name: "r50k_base",
        classes: &[],
        models: &["gpt2"],
        num_ranks: 50_256,
        pattern: R50K,
        bos: "",
        eos: ENDOFTEXT,
        fixed: &[(ENDOFTEXT, 50_256)],
        numbered: &[],
    },
    Encoding {
        name: "p50k_base",
        classes: &[],
        models: &[],
        num_ranks: 50_280,
        pattern: R50K,
        bos: "",
        eos: ENDOFTEXT,
        fixed: &[(ENDOFTEXT, 50_256)],
        numbered: &[],
    },
];

impl Encoding {
    /// The special tokens of the published file, in the order of their ids.
    pub(super) fn special_tokens(&self) -> Vec<(String, u32)> {
        let fixed = self.fixed.iter().map(|(name, id)| (name.to_string(), *id));
        let numbered = self.numbered.iter().flat_map(|(start, number, id, count)| {
            (0..*count).map(move |index| (format!("{start}{}|>", number + index), id + index))
        });
        let mut tokens: Vec<(String, u32)> = fixed.chain(numbered).collect();
        tokens.sort_by_key(|(_, id)| *id);
        tokens
    }
}
