//! Pictures of a schedule like those in the papers: one row per rank, time to the right.

mod svg;
mod text;

pub use svg::svg;
pub use text::text;

use crate::{action::Op, schedule::Schedule, simulate::Span};

/// The label of a pass: its kind, its micro-batch and, with several chunks, the chunk's letter.
fn label(schedule: &Schedule, span: &Span) -> String {
    let kind = match span.action.op {
        Op::Forward => 'F',
        Op::BackwardWeight => 'W',
        _ => 'B',
    };
    let chunk = match schedule.stages.num_chunks {
        1 => String::new(),
        _ => chunk_name(span.action.chunk),
    };
    format!("{kind}{}{chunk}", span.action.micro_batch)
}

/// Names chunks a to z, then aa and so on.
fn chunk_name(chunk: usize) -> String {
    let letter = char::from(b'a' + (chunk % 26) as u8);
    match chunk / 26 {
        0 => letter.into(),
        more => format!("{}{letter}", chunk_name(more - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_letters() {
        assert_eq!(
            [0, 3, 25, 26, 51, 52].map(chunk_name),
            ["a", "d", "z", "aa", "az", "ba"]
        );
    }
}
