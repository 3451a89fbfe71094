//! Region moves on device tensors: a collective on full rows, with a split before it and a
//! concatenation after it along any dimension. Both are kernels of the device.

use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{Shape, Slice},
};

use crate::{
    call::{Collective, ReduceOp},
    error::CollectiveError,
    group::Group,
    region::moves::{Move, check_divides},
};

/// Collectives on tensors of a backend, along the first dimension.
pub(crate) trait RowCollectives<B: Backend> {
    fn group(&self) -> &Group;
    /// Runs a collective. An all-to-all exchanges one row with each member; a maximum is NaN where
    /// any member has NaN.
    fn run(&self, op: Collective, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;
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
        Move::AllReduce => wire.run(Collective::AllReduce(ReduceOp::Sum), x),
        Move::AllReduceMax => wire.run(Collective::AllReduce(ReduceOp::Max), x),
        Move::AllGather { dim } => {
            let outer = outer(&shape, dim);
            let share = shape.num_elements() / outer.max(1);
            shape[dim] *= size;
            let rows = wire.run(Collective::AllGather, reshaped::<B>(x, [outer, share]))?;
            Ok(B::float_reshape(
                swapped::<B>(rows, [size, outer, share]),
                shape,
            ))
        }
        Move::ReduceScatter { dim } => {
            let [outer, share] = cut(&x, dim, Collective::ReduceScatter(ReduceOp::Sum), group)?;
            shape[dim] /= size;
            let rows = swapped::<B>(x, [outer, size, share]);
            let rows = reshaped::<B>(rows, [size, outer * share]);
            let rows = wire.run(Collective::ReduceScatter(ReduceOp::Sum), rows)?;
            Ok(B::float_reshape(rows, shape))
        }
        Move::Split { dim } => {
            let [outer, share] = cut(&x, dim, Collective::AllGather, group)?;
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
            let [above, share] = cut(&x, split, Collective::AllToAll, group)?;
            shape[split] /= size;
            let piece = shape.num_elements();
            let rows = reshaped::<B>(swapped::<B>(x, [above, size, share]), [size, piece]);
            let rows = wire.run(Collective::AllToAll, rows)?;
            let above = outer(&shape, concat);
            shape[concat] *= size;
            let joined = swapped::<B>(rows, [size, above, piece / above.max(1)]);
            Ok(B::float_reshape(joined, shape))
        }
        Move::Shift { by } if group.at(by) == group.rank() => Ok(x),
        Move::Shift { by } => wire.run(Collective::Shift { by }, x),
    }
}

/// Returns the product of the dimensions before `dim`, and the number of elements in one member's
/// part of each of these rows.
fn cut<T: TensorMetadata>(
    x: &T,
    dim: usize,
    op: Collective,
    group: &Group,
) -> Result<[usize; 2], CollectiveError> {
    let shape = x.shape();
    check_divides(&shape, x.dtype(), dim, op, group)?;
    let outer = shape[..dim].iter().product::<usize>();
    Ok([outer, shape.num_elements() / outer.max(1) / group.size()])
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
    use crate::{launch::run_threads, options::GroupOptions, region::moves};

    /// The collectives of the host, on rows.
    struct HostWire<'a>(&'a Group);

    impl RowCollectives<Flex> for HostWire<'_> {
        fn group(&self) -> &Group {
            self.0
        }
        fn run(
            &self,
            op: Collective,
            x: FloatTensor<Flex>,
        ) -> Result<FloatTensor<Flex>, CollectiveError> {
            let device = x.device();
            let data = burn::tensor::read_sync(Flex::float_into_data(x)).unwrap();
            let data = self.0.run_on_host(op, data)?;
            Ok(Flex::float_from_data(data, &device))
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
