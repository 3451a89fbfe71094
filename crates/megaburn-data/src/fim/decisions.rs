//! What is decided at random about each document.

use megaburn_mesh::PositionRng;

/// Decisions, in the order in which they are asked for.
pub(super) trait Decisions {
    /// Whether something happens that has this probability.
    fn happens(&mut self, rate: f64) -> bool;
    /// Two places in a text of this number of characters, from 0 before the first to `len` after
    /// the last, in ascending order. Both are uniform.
    fn boundaries(&mut self, len: usize) -> [usize; 2];
}

/// Decisions about the documents of one sample: the `n`-th is a pure function of a stream of random
/// numbers and `n`.
#[derive(Debug)]
pub(super) struct KeyedDecisions {
    rng: PositionRng,
    num_drawn: u64,
}

impl KeyedDecisions {
    pub(super) fn new(rng: PositionRng) -> Self {
        Self { rng, num_drawn: 0 }
    }

    fn draw(&mut self) -> u64 {
        let at = self.num_drawn;
        self.num_drawn += 1;
        at
    }
}

impl Decisions for KeyedDecisions {
    fn happens(&mut self, rate: f64) -> bool {
        let at = self.draw();
        // 53 bits are uniform in [0, 1), so a rate of 1 always happens and one of 0 never.
        let uniform = (self.rng.bits64(at) >> 11) as f64 / (1u64 << 53) as f64;
        uniform < rate
    }

    fn boundaries(&mut self, len: usize) -> [usize; 2] {
        let mut places = [0; 2].map(|_: usize| {
            let at = self.draw();
            self.rng.below(at, len as u64 + 1) as usize
        });
        places.sort_unstable();
        places
    }
}
