//! What an update uses, as pure functions of the samples that were trained on: a resumed run needs no
//! state beside that number, and a batch that grows does not bend them.

mod learning_rate;
mod weight_decay;

pub use learning_rate::{Decay, LrSchedule, WsdStyle};
pub use weight_decay::{WeightDecaySchedule, WeightDecayStyle};
