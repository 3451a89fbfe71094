//! Checks every region function against its definition, and proves that it is adjoint: `<A x, y> =
//! <x, A^T y>` summed over the ranks, where a replicated tensor counts once.

use burn::{
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{
    CollectiveError, Group, GroupOptions, ReduceOp,
    region::{
        all_to_all, copy_to, gather_from_last_dim, gather_from_sequence,
        gather_from_sequence_to_replicas, reduce_from, reduce_scatter_to_sequence, ring_shift,
        scatter_to_last_dim, scatter_to_sequence,
    },
    run_threads,
};
use megaburn_mesh::{PositionRng, Purpose};
use rstest::rstest;

type Region = fn(Tensor<3>, &Group) -> Tensor<3>;

/// Whether the tensor is replicated at an end of the region.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Same,
    Own,
}
use End::{Own, Same};

fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    println!("seed {}", now.as_nanos() as u64);
    now.as_nanos() as u64
}

/// Random integers, whose sums and products are exact in f32 in any order.
fn random(shape: [usize; 3], seed: u64, stream: u64) -> TensorData {
    let rng = PositionRng::new(seed, Purpose::Sampling, "adjoint").with_stream(stream);
    let len: usize = shape.iter().product();
    TensorData::new(
        (0..len as u64)
            .map(|i| rng.below(i, 15) as f32 - 7.0)
            .collect(),
        shape,
    )
}

fn dot(a: &Tensor<3>, b: &Tensor<3>) -> f32 {
    (a.clone() * b.clone()).sum().into_scalar::<f32>()
}

/// `dot` over the logical tensor: counted once if it is replicated, else summed over the ranks.
fn world_dot(local: f32, end: End, group: &Group) -> Result<f32, CollectiveError> {
    if end == Same {
        return Ok(local);
    }
    let sum = group.all_reduce(TensorData::from([local]), ReduceOp::Sum)?;
    Ok(sum.try_to_vec::<f32>().unwrap()[0])
}

#[rstest]
#[case::copy(copy_to, Same, Own)]
#[case::reduce(reduce_from, Own, Same)]
#[case::scatter_last(scatter_to_last_dim, Same, Own)]
#[case::gather_last(gather_from_last_dim, Own, Same)]
#[case::scatter_sequence(scatter_to_sequence, Same, Own)]
#[case::gather_sequence(gather_from_sequence, Own, Own)]
#[case::gather_to_replicas(gather_from_sequence_to_replicas, Own, Same)]
#[case::reduce_scatter(reduce_scatter_to_sequence, Own, Own)]
#[case::heads_to_sequence(|x: Tensor<3>, g: &Group| all_to_all(x, 0, 2, g), Own, Own)]
#[case::sequence_to_heads(|x: Tensor<3>, g: &Group| all_to_all(x, 1, 0, g), Own, Own)]
#[case::shift(|x: Tensor<3>, g: &Group| ring_shift(x, 1, g), Own, Own)]
#[case::shift_back(|x: Tensor<3>, g: &Group| ring_shift(x, -2, g), Own, Own)]
fn a_regions_backward_is_its_adjoint(
    #[case] region: impl Fn(Tensor<3>, &Group) -> Tensor<3> + Sync,
    #[case] input: End,
    #[case] output: End,
    #[values(1, 2, 3, 4)] size: usize,
    #[values([12, 24, 12], [12, 12, 36])] shape: [usize; 3],
) {
    let seed = fresh_seed();
    let results = run_threads(size, GroupOptions::default(), |group| {
        let plain = Device::flex();
        let own = |end: End| {
            if end == Same {
                0
            } else {
                1 + group.rank() as u64
            }
        };
        let x_data = random(shape, seed, own(input));
        let x = Tensor::<3>::from_data(x_data.clone(), &plain.clone().autodiff()).require_grad();
        let ax = region(x.clone(), &group);
        let y = Tensor::<3>::from_data(random(ax.dims(), seed + 1, own(output)), &plain);
        let grads = (ax.clone() * Tensor::from_inner(y.clone()))
            .sum()
            .backward();
        let aty = x.grad(&grads).unwrap();
        let left = world_dot(dot(&ax.inner(), &y), output, &group)?;
        let right = world_dot(dot(&Tensor::from_data(x_data, &plain), &aty), input, &group)?;
        Ok::<_, CollectiveError>((left, right))
    });
    for result in results {
        let (left, right) = result.unwrap();
        assert_eq!(left, right);
    }
}

/// The part of the full tensor along `dim` that rank `r` of `size` holds.
fn share(whole: &Tensor<3>, dim: usize, r: usize, size: usize) -> Tensor<3> {
    let len = whole.dims()[dim] / size;
    whole.clone().narrow(dim, r * len, len)
}

#[rstest]
fn gathers_and_scatters_are_what_they_say(#[values(1, 2, 3, 4)] size: usize) {
    let seed = fresh_seed();
    let results = run_threads(size, GroupOptions::default(), |group| {
        let device = Device::flex();
        let whole = Tensor::<3>::from_data(random([12, 3, 24], seed, 0), &device);
        let rank = group.rank();
        let n = group.size();
        for (dim, scatter, gather) in [
            (
                0,
                scatter_to_sequence as Region,
                gather_from_sequence as Region,
            ),
            (0, scatter_to_sequence, gather_from_sequence_to_replicas),
            (2, scatter_to_last_dim, gather_from_last_dim),
        ] {
            let mine = scatter(whole.clone(), &group);
            mine.to_data()
                .assert_eq(&share(&whole, dim, rank, n).to_data(), true);
            gather(mine, &group)
                .to_data()
                .assert_eq(&whole.to_data(), true);
        }
        let term = |r: usize| Tensor::<3>::from_data(random([12, 3, 24], seed, r as u64), &device);
        let sum = (1..n).fold(term(0), |sum, r| sum + term(r));
        reduce_from(term(rank), &group)
            .to_data()
            .assert_eq(&sum.to_data(), true);
        let stretch = reduce_scatter_to_sequence(term(rank), &group);
        stretch
            .to_data()
            .assert_eq(&share(&sum, 0, rank, n).to_data(), true);
        copy_to(term(rank), &group)
            .to_data()
            .assert_eq(&term(rank).to_data(), true);
        let left = ring_shift(term(rank), 1, &group);
        left.to_data()
            .assert_eq(&term((rank + n - 1) % n).to_data(), true);
        let heads = all_to_all(share(&whole, 0, rank, n), 2, 0, &group);
        heads
            .to_data()
            .assert_eq(&share(&whole, 2, rank, n).to_data(), true);
        Ok::<_, CollectiveError>(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_region_that_fails_panics_with_the_errors_text() {
    let results = run_threads(2, GroupOptions::default(), |group| {
        let x = Tensor::<2>::ones([2 + group.rank(), 3], &Device::flex());
        reduce_from(x, &group);
        Ok::<_, CollectiveError>(())
    });
    for result in results {
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("ranks disagree") && message.contains("[3, 3]"),
            "{message}"
        );
    }
}

#[test]
fn a_dimension_that_does_not_divide_is_an_error_on_every_rank() {
    let results = run_threads(2, GroupOptions::default(), |group| {
        scatter_to_sequence(Tensor::<2>::ones([3, 2], &Device::flex()), &group);
        Ok::<_, CollectiveError>(())
    });
    for result in results {
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("has 3 elements, not divisible by 2"),
            "{message}"
        );
    }
}
