//! The model of a checkpoint, in short.

use megaburn_models::DecoderConfig;
use megaburn_report::console::human_number;
use serde_json::Value;

use super::{state_keys::by_key, units::shortened};

/// Characters of a model that this version does not know.
const LONGEST: usize = 100;

/// A model's configuration in a line.
pub(in crate::cli) fn describe(model: &Value) -> String {
    let config = serde_json::from_value::<DecoderConfig>(model.clone()).ok();
    let known = config.and_then(|config| {
        let params = config.whole_plan().ok()?.num_global();
        let params = human_number(params as f64);
        let family = config.family;
        Some(format!(
            "{family}, {params} parameters: {}",
            config.summary()
        ))
    });
    known.unwrap_or_else(|| {
        let keys = by_key("", model).into_iter();
        let keys = keys.map(|(key, value)| format!("{key} {value}"));
        shortened(&keys.collect::<Vec<_>>().join(", "), LONGEST)
    })
}
