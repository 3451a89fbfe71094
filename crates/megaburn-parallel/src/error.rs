use megaburn_collective::CollectiveError;
use megaburn_mesh::MeshError;
use thiserror::Error;

/// Why a parallel layer cannot be built.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum ParallelError {
    #[error(
        "a {layer} in group {group} of {size} ranks needs a name, which seeds its weights \
        equally on every rank: add `.with_name(\"path\")`"
    )]
    Unnamed {
        layer: &'static str,
        group: String,
        size: usize,
    },
    #[error("{layer} `{name}`: {why}")]
    Config {
        layer: &'static str,
        name: String,
        why: String,
    },
    #[error("`{name}`: {source}")]
    Shard { name: String, source: MeshError },
    #[error("the shard plan does not describe the module: {why}")]
    Plan { why: String },
    #[error(
        "layers `{first}` and `{second}` are both named `{name}` and would be initialized with \
        the same weights: name each by its own path"
    )]
    SameName {
        name: String,
        first: String,
        second: String,
    },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}
