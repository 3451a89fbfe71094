use crate::{TrainError, trainer::{Progress, Trainer}};
impl Trainer {
    pub(crate) fn save(&self) -> Result<(), TrainError> { Ok(()) }
    pub(crate) fn resume(&mut self) -> Result<Option<Progress>, TrainError> { Ok(None) }
    pub(crate) fn discard_checkpoints(&self) -> Result<Option<Progress>, TrainError> { Ok(None) }
}
