use std::str::FromStr;

use crate::{error::PipelineError, kind::ScheduleKind};

impl FromStr for ScheduleKind {
    type Err = PipelineError;

    fn from_str(text: &str) -> Result<Self, PipelineError> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| PipelineError::UnknownKind { text: text.into() })
    }
}
