use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How documents are put into samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[derive(JsonSchema)]
pub enum Packing {
    /// Samples are cut out of the joined documents at fixed positions.
    #[default]
    None,
    /// Samples are filled with whole documents by best-fit decreasing, so only documents longer than
    /// a sample are cut.
    BestFit,
}
