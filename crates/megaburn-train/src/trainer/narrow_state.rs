//! Runs whose optimizer stores masters as remainders, or moments in 8 bits.

use rstest::rstest;

use super::testing::trainers;

const BF16: &str = "train.dtype=bf16";
const REMAINDERS: &str = "optimizer.store_param_remainders=true";
const MOMENTS: [&str; 2] = [
    "optimizer.exp_avg_dtype=fp8",
    "optimizer.exp_avg_sq_dtype=fp8",
];

/// The losses of a few steps on rank 0, and their gradients' norms. Copies of parameters must stay
/// the same.
fn losses(layout: &str, sets: &[&str], steps: usize) -> Vec<[u64; 2]> {
    let sets = [&["optimizer.lr=0.01"], sets].concat();
    let mut ranks = trainers(&sets, layout, |mut trainer| {
        let mut found = Vec::new();
        for _ in 0..steps {
            let metrics = trainer.step()?;
            found.push([metrics.loss, metrics.grad_norm].map(f64::to_bits));
        }
        trainer.check_replicas()?;
        Ok(found)
    });
    ranks.remove(0)
}

#[rstest]
#[case("tp1", "parallel.zero=0")]
#[case("tp2-dp2-sp", "parallel.zero=1")]
#[case("dp2", "parallel.zero=3")]
#[case("pp2-dp2", "parallel.zero=2")]
fn losses_with_remainders_are_those_of_masters(#[case] layout: &str, #[case] zero: &str) {
    let expected = losses(layout, &[BF16, zero], 4);
    assert_eq!(losses(layout, &[BF16, zero, REMAINDERS], 4), expected);
}

/// ZeRO does not cut the blocks of moments in 8 bits.
#[test]
fn losses_with_moments_in_8_bits_do_not_depend_on_zero() {
    let run = |zero| -> Vec<u64> {
        let sets = [BF16, zero, REMAINDERS, MOMENTS[0], MOMENTS[1]];
        // The norms of gradients are sums in another order.
        let found = losses("dp2", &sets, 4).into_iter();
        found.map(|[loss, _]| loss).collect()
    };
    let expected = run("parallel.zero=0");
    assert_eq!(run("parallel.zero=1"), expected);
    assert_eq!(run("parallel.zero=3"), expected);
}

#[rstest]
#[case("tp2-sp", &[])]
#[case("pp2", &["model.tied=true"])]
#[case("tp1", &["optimizer.name=lion", "optimizer.lr=0.001"])]
fn losses_with_moments_in_8_bits_are_close(#[case] layout: &str, #[case] sets: &[&str]) {
    let run = |moments: &[&str]| losses(layout, &[sets, moments].concat(), 12);
    let [found, expected] = [run(&MOMENTS), run(&[])];
    assert_ne!(found, expected);
    let [first, last] = [expected[0][0], expected[11][0]].map(f64::from_bits);
    assert!(last < 0.95 * first, "it does not learn: {first} to {last}");
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let [found, expected] = [found[0], expected[0]].map(f64::from_bits);
        assert!(
            (found / expected - 1.0).abs() < 0.02,
            "step {step}: {found}, not {expected}"
        );
    }
}
