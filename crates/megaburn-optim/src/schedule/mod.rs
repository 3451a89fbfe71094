//! The rates of an update, as pure functions of the number of samples trained on. A resumed run
//! needs no other state, and a batch ramp does not distort the schedules.

mod learning_rate;
mod weight_decay;

pub use learning_rate::{Decay, LrSchedule, WsdStyle};
pub use weight_decay::{WeightDecaySchedule, WeightDecayStyle};
