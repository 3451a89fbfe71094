//! The check of a whole configuration. The fields carry their ranges as attributes, and each section
//! checks what its keys require of each other.

use super::{TrainConfig, ranges};
use crate::TrainError;

impl TrainConfig {
    /// Refuses values that no run can use. Called by
    /// [`ConfigLayers::load`](super::ConfigLayers::load).
    ///
    /// # Errors
    /// The first such value; the error names its key.
    pub fn validate(&self) -> Result<(), TrainError> {
        self.run.validate()?;
        ranges::check("", self)?;
        self.model.validate()?;
        self.parallel.validate_pipeline()?;
        self.data.validate()?;
        self.train.validate()?;
        self.optimizer.validate(&self.train)?;
        self.recompute.validate()?;
        self.generate.validate()
    }
}
