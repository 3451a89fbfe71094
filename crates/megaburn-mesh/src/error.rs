use thiserror::Error;

/// Why a layout, mesh or shard is not possible.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum MeshError {
    #[error(
        "layout `{text}`: {why}; write it like `tp2-dp2-sp` (axes: tp cp pp dp ep etp, flag: sp)"
    )]
    Syntax { text: String, why: String },
    #[error("layout `{layout}` has degree 0 on {axis}: every degree is at least 1")]
    ZeroDegree { layout: String, axis: &'static str },
    #[error("layout `{layout}`: sequence parallelism (sp) needs tp > 1, and tp is 1")]
    SequenceWithoutTensor { layout: String },
    #[error(
        "layout `{layout}`: tp {tp} with experts needs sequence parallelism, or every expert sees each token {tp} times; add `-sp`"
    )]
    ExpertsWithoutSequence { layout: String, tp: usize },
    #[error(
        "layout `{layout}`: ep {ep} and etp {etp} shard experts, but the model has no experts: remove them"
    )]
    NoExperts {
        layout: String,
        ep: usize,
        etp: usize,
    },
    #[error("layout `{layout}`: ep {ep} x etp {etp} = {} does not divide tp {tp} x cp {cp} x dp {dp} = {}", ep * etp, tp * cp * dp)]
    ExpertGrid {
        layout: String,
        ep: usize,
        etp: usize,
        tp: usize,
        cp: usize,
        dp: usize,
    },
    #[error("layout `{layout}` needs tp {tp} x cp {cp} x pp {pp} x dp {dp} = {} ranks, but there \
            are {world}: start that many, or choose another layout", tp * cp * pp * dp)]
    World {
        layout: String,
        tp: usize,
        cp: usize,
        pp: usize,
        dp: usize,
        world: usize,
    },
    #[error("layout `{layout}`: tp {tp} x cp {cp} x pp {pp} = {0} does not divide the {world} \
            ranks, so no dp uses all of them: choose another layout, or a multiple of {0} ranks", tp * cp * pp)]
    NoDp {
        layout: String,
        tp: usize,
        cp: usize,
        pp: usize,
        world: usize,
    },
    #[error(
        "layout `{layout}`: {what} {size} is not divisible by {divisor_name} {divisor}; {hint}"
    )]
    Indivisible {
        layout: String,
        what: &'static str,
        size: usize,
        divisor_name: &'static str,
        divisor: usize,
        hint: String,
    },
    #[error(
        "layout `{layout}`: {kv_heads} key/value heads over tp {tp}: one number must divide the other (heads {heads})"
    )]
    KvHeads {
        layout: String,
        kv_heads: usize,
        heads: usize,
        tp: usize,
    },
    #[error("dimension {dim} of {global_shape:?} has size {size}, but its parts add up to {parts}")]
    Parts {
        global_shape: Vec<usize>,
        dim: usize,
        size: usize,
        parts: usize,
    },
    #[error(
        "a part of {units} units of {unit} cannot be sharded over {ranks} {axis} ranks: one \
        number must divide the other"
    )]
    Units {
        units: usize,
        unit: usize,
        ranks: usize,
        axis: &'static str,
    },
    #[error(
        "cu_seqlens {cu_seqlens:?} must increase from 0 to {len}, the number of tokens in a row"
    )]
    PackedRows { cu_seqlens: Vec<usize>, len: usize },
    #[error(
        "the document of {len} tokens at position {start} of row {row} cannot be divided into \
        the {multiple} chunks of the zigzag split: pad it to a multiple of {multiple}"
    )]
    DocumentLength {
        row: usize,
        start: usize,
        len: usize,
        multiple: usize,
    },
    #[error("two parameters are named `{path}`")]
    DuplicateParam { path: String },
}
