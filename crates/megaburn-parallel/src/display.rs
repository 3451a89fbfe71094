//! How modules print themselves, e.g. in the summary of Burn's `Learner`: the sizes of the full layer in
//! the names of Burn's own layers, and the number of ranks that split it or hold copies.

use burn::module::DisplaySettings;

/// One line for a layer, as Burn's own layers have.
pub(crate) fn one_line() -> Option<DisplaySettings> {
    DisplaySettings::new()
        .with_new_line_after_attribute(false)
        .optional()
}
