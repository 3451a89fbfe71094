use burn::tensor::TensorData;

use crate::{CollectiveError, Group, joined::joined, message::OpKind};

impl Group {
    /// [`Group::all_to_all`] on stretches of rows of one tensor.
    pub(crate) fn all_to_all_rows(
        &self,
        x: TensorData,
        send: &[usize],
        recv: &[usize],
    ) -> Result<TensorData, CollectiveError> {
        let (mut shape, dtype) = (x.shape().to_vec(), x.dtype());
        let (rows, size) = (shape[0], self.size());
        let refuse = |x: &TensorData, why: String| {
            let call = self.next_call(OpKind::AllToAll, x);
            self.run(&call, |_, _| Err(self.bad_argument(&call, why)))
        };
        if send.len() != size || recv.len() != size || send.iter().sum::<usize>() != rows {
            let why =
                format!("{send:?} to send and {recv:?} to receive, of {rows} rows, by {size}");
            return refuse(&x, why);
        }
        let row = shape[1..].iter().product::<usize>() * dtype.size();
        let bytes: &[u8] = x.bytes();
        let mut start = 0;
        let parts = send.iter().map(|&rows| {
            let part = joined([&bytes[start..start + rows * row]].into_iter(), dtype);
            start += rows * row;
            let mut shape = shape.clone();
            shape[0] = rows;
            TensorData::from_bytes(part, shape, dtype)
        });
        let got = self.all_to_all(parts.collect())?;
        let counts: Vec<usize> = got.iter().map(|part| part.shape()[0]).collect();
        if counts != recv {
            return refuse(&x, format!("{recv:?} rows expected, {counts:?} came"));
        }
        shape[0] = recv.iter().sum();
        let all = joined(got.iter().map(|part| -> &[u8] { part.bytes() }), dtype);
        Ok(TensorData::from_bytes(all, shape, dtype))
    }
}
