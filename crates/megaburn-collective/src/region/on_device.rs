//! Region moves on device tensors: a collective on full rows, with a split before it and a
//! concatenation after it along any dimension. Both are kernels of the device.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{Shape, Slice},
};

use crate::{
    CollectiveError, Group,
    message::{Call, OpKind},
    region::op::Move,
};

/// Collectives on tensors of a backend, along the first dimension.
pub(crate) trait RowCollectives<B: Backend> {
    fn group(&self) -> &Group;
    fn all_reduce(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;
    /// The elementwise maximum; NaN where any member has NaN.
    fn max(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;
    fn all_gather(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;
    fn reduce_scatter(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;
    /// Exchanges one row with each member.
    fn all_to_all(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;
    fn shift(&self, x: FloatTensor<B>, by: isize) -> Result<FloatTensor<B>, CollectiveError>;
}

pub(crate) fn run<B: Backend>(
    x: FloatTensor<B>,
    mv: Move,
    wire: &impl RowCollectives<B>,
) -> Result<FloatTensor<B>, CollectiveError> {
    let (group, size) = (wire.group(), wire.group().size());
    let mut shape = x.shape();
    let outer = |shape: &Shape, dim: usize| shape[..dim].iter().product::<usize>();
    match mv {
        Move::Identity => Ok(x),
        Move::AllReduce => wire.all_reduce(x),
        Move::AllReduceMax => wire.max(x),
        Move::AllGather { dim } => {
            let outer = outer(&shape, dim);
            let share = shape.num_elements() / outer.max(1);
            shape[dim] *= size;
            let rows = wire.all_gather(reshaped::<B>(x, [outer, share]))?;
            Ok(B::float_reshape(
                swapped::<B>(rows, [size, outer, share]),
                shape,
            ))
        }
        Move::ReduceScatter { dim } => {
            let [outer, share] = cut(&x, dim, OpKind::ReduceScatterSum, group)?;
            shape[dim] /= size;
            let rows = swapped::<B>(x, [outer, size, share]);
            let rows = wire.reduce_scatter(reshaped::<B>(rows, [size, outer * share]))?;
            Ok(B::float_reshape(rows, shape))
        }
        Move::Split { dim } => {
            let [outer, share] = cut(&x, dim, OpKind::AllGather, group)?;
            shape[dim] /= size;
            let mine = Slice::from(group.rank()..group.rank() + 1);
            let all = [outer, share].map(|len| Slice::from(0..len));
            let x = B::float_reshape(x, Shape::new([outer, size, share]));
            Ok(B::float_reshape(
                B::float_slice(x, &[all[0], mine, all[1]]),
                shape,
            ))
        }
        Move::AllToAll { split, concat } => {
            let [above, share] = cut(&x, split, OpKind::AllToAll, group)?;
            shape[split] /= size;
            let piece = shape.num_elements();
            let rows = reshaped::<B>(swapped::<B>(x, [above, size, share]), [size, piece]);
            let rows = wire.all_to_all(rows)?;
            let above = outer(&shape, concat);
            shape[concat] *= size;
            let joined = swapped::<B>(rows, [size, above, piece / above.max(1)]);
            Ok(B::float_reshape(joined, shape))
        }
        Move::Shift { by } if group.at(by) == group.rank() => Ok(x),
        Move::Shift { by } => wire.shift(x, by),
    }
}

/// Returns the product of the dimensions before `dim`, and the number of elements in one member's
/// part of each of these rows.
fn cut<T: TensorMetadata>(
    x: &T,
    dim: usize,
    op: OpKind,
    group: &Group,
) -> Result<[usize; 2], CollectiveError> {
    let shape = x.shape();
    if shape[dim].is_multiple_of(group.size()) {
        let outer = shape[..dim].iter().product::<usize>();
        return Ok([outer, shape.num_elements() / outer.max(1) / group.size()]);
    }
    let len = shape[dim];
    let size = group.size();
    let shape = shape.as_slice().to_vec();
    let call = Call {
        op,
        seq: group.next_seq(),
        dtype: x.dtype(),
        shape,
    };
    let why = format!("dimension {dim} has {len} elements, not divisible by {size} members");
    group.run(&call, |_, _| Err(group.bad_argument(&call, why)))
}

fn reshaped<B: Backend>(x: FloatTensor<B>, shape: [usize; 2]) -> FloatTensor<B> {
    B::float_reshape(x, Shape::new(shape))
}

/// Reshapes to `[a, b, c]` and swaps the first two dimensions. Returns the tensor unchanged where
/// the swap would not change its memory order.
fn swapped<B: Backend>(x: FloatTensor<B>, [a, b, c]: [usize; 3]) -> FloatTensor<B> {
    if a == 1 || b == 1 {
        return x;
    }
    B::float_permute(B::float_reshape(x, Shape::new([a, b, c])), &[1, 0, 2])
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::{Flex, ops::FloatTensorOps},
        tensor::{Device, Tensor, TensorData},
    };

    use super::*;
    use crate::{GroupOptions, ReduceOp, region::moves, run_threads};

    /// The collectives of the host, on rows.
    struct HostWire<'a>(&'a Group);

    impl HostWire<'_> {
        fn over(
            &self,
            x: <Flex as burn::backend::BackendTypes>::FloatTensorPrimitive,
            call: impl FnOnce(TensorData) -> Result<TensorData, CollectiveError>,
        ) -> Result<<Flex as burn::backend::BackendTypes>::FloatTensorPrimitive, CollectiveError>
        {
            let device = x.device();
            let data = burn::tensor::read_sync(Flex::float_into_data(x)).unwrap();
            call(data).map(|data| Flex::float_from_data(data, &device))
        }
    }

    impl RowCollectives<Flex> for HostWire<'_> {
        fn group(&self) -> &Group {
            self.0
        }
        fn all_reduce(&self, x: FloatTensor<Flex>) -> Result<FloatTensor<Flex>, CollectiveError> {
            self.over(x, |x| self.0.all_reduce(x, ReduceOp::Sum))
        }
        fn max(&self, x: FloatTensor<Flex>) -> Result<FloatTensor<Flex>, CollectiveError> {
            self.over(x, |x| self.0.all_reduce(x, ReduceOp::Max))
        }
        fn all_gather(&self, x: FloatTensor<Flex>) -> Result<FloatTensor<Flex>, CollectiveError> {
            self.over(x, |x| self.0.all_gather(x))
        }
        fn reduce_scatter(
            &self,
            x: FloatTensor<Flex>,
        ) -> Result<FloatTensor<Flex>, CollectiveError> {
            self.over(x, |x| self.0.reduce_scatter(x, ReduceOp::Sum))
        }
        fn all_to_all(&self, x: FloatTensor<Flex>) -> Result<FloatTensor<Flex>, CollectiveError> {
            self.over(x, |x| {
                moves::run(
                    x,
                    Move::AllToAll {
                        split: 0,
                        concat: 0,
                    },
                    self.0,
                )
            })
        }
        fn shift(
            &self,
            x: FloatTensor<Flex>,
            by: isize,
        ) -> Result<FloatTensor<Flex>, CollectiveError> {
            self.over(x, |x| moves::run(x, Move::Shift { by }, self.0))
        }
    }

    fn moves_of_every_kind() -> Vec<Move> {
        let dims = 0..3;
        let mut all = vec![Move::Identity, Move::AllReduce, Move::AllReduceMax];
        all.extend([1, -2, 0].map(|by| Move::Shift { by }));
        for dim in dims.clone() {
            all.extend([
                Move::AllGather { dim },
                Move::ReduceScatter { dim },
                Move::Split { dim },
            ]);
            all.extend(
                dims.clone()
                    .map(|concat| Move::AllToAll { split: dim, concat }),
            );
        }
        all
    }

    #[test]
    fn moves_on_a_device_give_what_moves_on_the_host_give() {
        for size in [2, 3] {
            let results = run_threads(size, GroupOptions::default(), |group| {
                for shape in [[6, 12, 18], [6, 6, 6], [6, 0, 12]] {
                    let count: usize = shape.iter().product();
                    let values = (0..count).map(|i| (i * 7 % 101 + 1000 * group.rank()) as f32);
                    let x = Tensor::<3>::from_data(
                        TensorData::new(values.collect::<Vec<_>>(), shape),
                        &Device::flex(),
                    );
                    for mv in moves_of_every_kind() {
                        let host = moves::run(x.to_data(), mv, &group)?;
                        let x = x.clone().try_into_primitive::<Flex>().unwrap();
                        let device = run::<Flex>(x, mv, &HostWire(&group))?;
                        let device = Tensor::<3>::from_primitive::<Flex>(device).into_data();
                        assert_eq!(device, host, "{mv:?} of {shape:?} on {size}");
                    }
                }
                Ok::<_, CollectiveError>(())
            });
            results.into_iter().for_each(|result| result.unwrap());
        }
    }
}
