use super::{
    Family, bert, deepseek_v2, deepseek_v3, falcon, gemma2, gemma3, gpt_neox, gpt_oss, gpt2,
    granite, llama, megatron_bert, mistral, mixtral, nemotron, olmo2, olmoe, phi3, qwen2,
    qwen2_moe, qwen3, qwen3_moe, starcoder2, t5,
};

impl Family {
    /// GPT-2: Radford et al., "Language models are unsupervised multitask learners" (2019).
    pub const GPT2: Self = Self(&gpt2::SPEC);
    /// Llama 2, 3 and 3.x.
    pub const LLAMA: Self = Self(&llama::SPEC);
    /// Mistral 7B and its successors.
    pub const MISTRAL: Self = Self(&mistral::SPEC);
    /// Qwen2 and Qwen2.5.
    pub const QWEN2: Self = Self(&qwen2::SPEC);
    /// Mixtral 8x7B and 8x22B.
    pub const MIXTRAL: Self = Self(&mixtral::SPEC);
    /// Qwen3, dense.
    pub const QWEN3: Self = Self(&qwen3::SPEC);
    /// Qwen3 mixture-of-experts models.
    pub const QWEN3_MOE: Self = Self(&qwen3_moe::SPEC);
    /// DeepSeek-V2 with its Coder and Lite variants.
    pub const DEEPSEEK_V2: Self = Self(&deepseek_v2::SPEC);
    /// DeepSeek-V3 and R1.
    pub const DEEPSEEK_V3: Self = Self(&deepseek_v3::SPEC);
    /// Gemma 2.
    pub const GEMMA2: Self = Self(&gemma2::SPEC);
    /// Gemma 3, the text model.
    pub const GEMMA3: Self = Self(&gemma3::SPEC);
    /// Phi-3 and Phi-4.
    pub const PHI3: Self = Self(&phi3::SPEC);
    /// OLMo 2.
    pub const OLMO2: Self = Self(&olmo2::SPEC);
    /// OLMoE, with experts.
    pub const OLMOE: Self = Self(&olmoe::SPEC);
    /// Granite 3, dense.
    pub const GRANITE: Self = Self(&granite::SPEC);
    /// StarCoder2.
    pub const STARCODER2: Self = Self(&starcoder2::SPEC);
    /// Nemotron-3 and 4, Minitron.
    pub const NEMOTRON: Self = Self(&nemotron::SPEC);
    /// GPT-NeoX and Pythia.
    pub const GPT_NEOX: Self = Self(&gpt_neox::SPEC);
    /// Qwen1.5 and Qwen2 mixture-of-experts models.
    pub const QWEN2_MOE: Self = Self(&qwen2_moe::SPEC);
    /// Falcon 7B, 11B, 40B and 180B.
    pub const FALCON: Self = Self(&falcon::SPEC);
    /// BERT, as `BertForPreTraining` and `BertForMaskedLM`.
    pub const BERT: Self = Self(&bert::SPEC);
    /// BERT with norms before attention and MLP, as Megatron-LM trains it.
    pub const MEGATRON_BERT: Self = Self(&megatron_bert::SPEC);
    /// T5, version 1.0 and 1.1, and FLAN-T5.
    pub const T5: Self = Self(&t5::SPEC);
    /// mT5: T5 1.1 for many languages.
    pub const MT5: Self = Self(&t5::MT5);

    /// gpt-oss 20B and 120B.
    pub const GPT_OSS: Self = Self(&gpt_oss::SPEC);

    /// The families of this crate.
    pub const BUILT_IN: [Self; 25] = [
        Self::GPT2,
        Self::LLAMA,
        Self::MISTRAL,
        Self::QWEN2,
        Self::MIXTRAL,
        Self::QWEN3,
        Self::QWEN3_MOE,
        Self::DEEPSEEK_V2,
        Self::DEEPSEEK_V3,
        Self::GEMMA2,
        Self::GEMMA3,
        Self::PHI3,
        Self::OLMO2,
        Self::OLMOE,
        Self::GRANITE,
        Self::STARCODER2,
        Self::NEMOTRON,
        Self::GPT_NEOX,
        Self::QWEN2_MOE,
        Self::FALCON,
        Self::BERT,
        Self::MEGATRON_BERT,
        Self::T5,
        Self::MT5,
        Self::GPT_OSS,
    ];
}
