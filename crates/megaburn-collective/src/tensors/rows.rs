use std::ops::Range;

use burn::tensor::{Bytes, TensorData};

use crate::{call::Collective, error::CollectiveError, group::Group, joined::joined};

/// Consecutive row ranges with the given lengths: one range per member.
pub(super) fn consecutive_ranges(rows: &[usize]) -> Vec<Vec<Range<usize>>> {
    let ranges = rows.iter().scan(0, |end, rows| {
        let start = *end;
        *end += rows;
        let range = start..*end;
        Some(vec![range])
    });
    ranges.collect()
}

/// Whether the ranges cover each of `rows` rows exactly once.
fn covers_all_rows(of_members: &[Vec<Range<usize>>], rows: usize) -> bool {
    let mut all: Vec<_> = of_members
        .iter()
        .flatten()
        .filter(|part| !part.is_empty())
        .collect();
    all.sort_by_key(|part| part.start);
    let end = all
        .into_iter()
        .try_fold(0, |end, part| (part.start == end).then_some(part.end));
    end == Some(rows)
}

impl Group {
    /// The row ranges of an all-to-all that exchanges equal parts of `rows` rows.
    pub(crate) fn equal_rows(&self, rows: usize) -> Vec<Vec<Range<usize>>> {
        consecutive_ranges(&vec![rows / self.size(); self.size()])
    }

    /// Checks that there is one list of ranges per member, that `send` covers each of `rows` rows
    /// once, and that `recv` has neither gaps nor overlaps.
    pub(crate) fn check_ranges(
        &self,
        [send, recv]: [&[Vec<Range<usize>>]; 2],
        rows: usize,
    ) -> Result<(), String> {
        let is_of_members = [send, recv].iter().all(|all| all.len() == self.size());
        if is_of_members && covers_all_rows(send, rows) && covers_all_rows(recv, num_rows(recv)) {
            return Ok(());
        }
        let size = self.size();
        Err(format!(
            "cannot send {send:?} and receive {recv:?} of {rows} rows among {size} members"
        ))
    }

    /// [`Group::all_to_all`] on row ranges of one tensor.
    pub(crate) fn all_to_all_rows(
        &self,
        x: TensorData,
        send: &[Vec<Range<usize>>],
        recv: &[Vec<Range<usize>>],
    ) -> Result<TensorData, CollectiveError> {
        let mut shape = x.shape().to_vec();
        let dtype = x.dtype();
        let refuse = |why: String| {
            let call = self.next_call(Collective::AllToAll, dtype, x.shape());
            self.refuse(&call, why)
        };
        if let Err(why) = self.check_ranges([send, recv], shape[0]) {
            return refuse(why);
        }
        let row = shape[1..].iter().product::<usize>() * dtype.size();
        let bytes: &[u8] = x.bytes();
        let parts = send.iter().map(|of_member| {
            let part = of_member
                .iter()
                .map(|rows| &bytes[rows.start * row..rows.end * row]);
            let mut shape = shape.clone();
            shape[0] = of_member.iter().map(Range::len).sum();
            TensorData::from_bytes(joined(part, dtype), shape, dtype)
        });
        let mut got = self.all_to_all(parts.collect())?;
        if self.is_rehearsal() {
            // The others would send as many rows as are expected.
            let zeros = |part: &Vec<Range<usize>>| {
                let mut shape = shape.clone();
                shape[0] = part.iter().map(Range::len).sum();
                let len = shape[0] * row;
                TensorData::from_bytes(Bytes::from_bytes_vec(vec![0; len]), shape, dtype)
            };
            got = recv.iter().map(zeros).collect();
        }
        let counts: Vec<usize> = got.iter().map(|part| part.shape()[0]).collect();
        let expected: Vec<usize> = recv
            .iter()
            .map(|part| part.iter().map(Range::len).sum())
            .collect();
        if counts != expected {
            return refuse(format!("expected {expected:?} rows, received {counts:?}"));
        }
        // Pairs of (first row in the result, bytes) of each received range, later sorted by the
        // row.
        let mut placed = Vec::new();
        for (part, of_member) in got.iter().zip(recv) {
            let mut start = 0;
            for rows in of_member {
                let end = start + rows.len() * row;
                placed.push((rows.start, &part.bytes()[start..end]));
                start = end;
            }
        }
        placed.sort_by_key(|(start, bytes)| (*start, bytes.len()));
        shape[0] = num_rows(recv);
        let all = joined(placed.into_iter().map(|(_, bytes)| bytes), dtype);
        Ok(TensorData::from_bytes(all, shape, dtype))
    }
}

fn num_rows(of_members: &[Vec<Range<usize>>]) -> usize {
    of_members.iter().flatten().map(Range::len).sum()
}
