//! The separate steps from logits to the experts of each token and their weights.

use burn::tensor::{DType, Int, Tensor, TensorData, activation};

use super::options::{RouterGroups, RouterOptions, RouterScores, TINY};

/// Computes the scores of all experts.
///
/// # Shapes
/// `logits` and result: `[t, e]`, the result in f32
pub fn router_scores(logits: Tensor<2>, scores: RouterScores) -> Tensor<2> {
    let logits = logits.cast(DType::F32);
    match scores {
        RouterScores::Softmax => activation::softmax(logits, 1),
        RouterScores::Sigmoid => activation::sigmoid(logits),
    }
}

/// Chooses the experts of each token, best first. Ties go to the lower index, so that every rank
/// and every pass makes the same choice. NaN is the worst score. `bias` (`[e]`) is added for the
/// choice only; the weights do not depend on it.
///
/// # Shapes
/// `scores`: `[t, e]`; result: `top_k` per token
///
/// # Panics
/// If `top_k` exceeds the number of experts, or of experts in the groups that are kept; or if the
/// number of groups does not divide the number of experts.
pub fn choose_experts(
    scores: &[f32],
    num_experts: usize,
    bias: Option<&[f32]>,
    options: &RouterOptions,
) -> Vec<u32> {
    options.check("choose_experts", num_experts);
    let RouterOptions { top_k, groups, .. } = *options;
    let of_group = groups.map_or(num_experts, |groups| num_experts / groups.num);
    let mut chosen = Vec::with_capacity(scores.len() / num_experts * top_k);
    let mut by = vec![0.0; num_experts];
    for token in scores.chunks_exact(num_experts) {
        for (expert, (by, score)) in by.iter_mut().zip(token).enumerate() {
            *by = number(score + bias.map_or(0.0, |bias| bias[expert]));
        }
        let mut left: Vec<usize> = match groups {
            None => (0..num_experts).collect(),
            Some(RouterGroups { num, kept, best }) => {
                let score = |group: usize| -> f32 {
                    let mut of = by[group * of_group..][..of_group].to_vec();
                    of.sort_by(|a, b| b.total_cmp(a));
                    number(of.iter().take(best).sum())
                };
                let all: Vec<f32> = (0..num).map(score).collect();
                let mut order: Vec<usize> = (0..num).collect();
                order.sort_by(|&a, &b| all[b].total_cmp(&all[a]));
                order.truncate(kept);
                order.sort_unstable();
                order
                    .iter()
                    .flat_map(|group| group * of_group..(group + 1) * of_group)
                    .collect()
            }
        };
        // The sort is stable, so the lower index wins ties.
        left.sort_by(|&a, &b| by[b].total_cmp(&by[a]));
        chosen.extend(left[..top_k].iter().map(|&expert| expert as u32));
    }
    chosen
}

/// Replaces NaN by negative infinity, the worst score.
fn number(score: f32) -> f32 {
    if score.is_nan() {
        f32::NEG_INFINITY
    } else {
        score
    }
}

/// The weights of each token's experts.
///
/// # Shapes
/// `scores`: `[t, e]`; `chosen`: `top_k` per token; result: `[t, top_k]`
pub fn expert_weights(scores: Tensor<2>, chosen: &[u32], options: &RouterOptions) -> Tensor<2> {
    let [tokens, _] = scores.dims();
    let ids: Vec<i64> = chosen.iter().map(|&expert| i64::from(expert)).collect();
    let ids = TensorData::new(ids, [tokens, options.top_k]);
    let ids = Tensor::<2, Int>::from_data(ids, &scores.device());
    let weights = scores.gather(1, ids);
    let weights = if options.normalise {
        weights.clone() / (weights.sum_dim(1) + TINY)
    } else {
        weights
    };
    if options.scale == 1.0 {
        weights
    } else {
        weights * options.scale
    }
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_close, constant, values};
    use rstest::rstest;

    use super::*;

    fn options(top_k: usize, groups: Option<[usize; 3]>) -> RouterOptions {
        let groups = groups.map(|[num, kept, best]| RouterGroups { num, kept, best });
        let scores = RouterScores::Softmax;
        RouterOptions {
            top_k,
            scores,
            normalise: false,
            scale: 1.0,
            groups,
        }
    }

    #[rstest]
    #[case(2, None, None, &[3, 1])]
    #[case(3, None, None, &[3, 1, 4])]
    // Ties in index order.
    #[case(5, None, None, &[3, 1, 4, 0, 2])]
    #[case(2, None, Some([0.0, 0.0, 9.0, 0.0, 0.0, 0.0]), &[2, 3])]
    // Groups ranked by the sum of their two best scores: 0.7, 1.0, 0.5.
    #[case(2, Some([3, 1, 2]), None, &[3, 2])]
    #[case(2, Some([3, 2, 2]), None, &[3, 1])]
    // Groups ranked by their best score: 0.6, 0.9, 0.5.
    #[case(3, Some([3, 2, 1]), None, &[3, 1, 0])]
    #[case(1, Some([3, 1, 2]), Some([0.0, 0.0, 0.0, 0.0, 0.7, 0.0]), &[4])]
    fn the_best_are_chosen(
        #[case] top_k: usize,
        #[case] groups: Option<[usize; 3]>,
        #[case] bias: Option<[f32; 6]>,
        #[case] expected: &[u32],
    ) {
        let scores = [0.1, 0.6, 0.1, 0.9, 0.5, 0.0];
        let bias = bias.as_ref().map(<[f32; 6]>::as_slice);
        assert_eq!(
            choose_experts(&scores, 6, bias, &options(top_k, groups)),
            expected
        );
    }

    #[test]
    fn what_is_no_number_is_chosen_last_and_by_all_alike() {
        let scores = [
            f32::NAN,
            0.2,
            f32::NAN,
            0.1,
            f32::NAN,
            f32::NAN,
            f32::NAN,
            f32::NAN,
        ];
        assert_eq!(
            choose_experts(&scores, 4, None, &options(2, None)),
            [1, 3, 0, 1]
        );
    }

    #[test]
    #[should_panic(
        expected = "choose_experts: top_k 3 must be between 1 and the number of experts to choose from, 2"
    )]
    fn more_experts_than_groups_have_are_refused() {
        choose_experts(&[0.0; 4], 4, None, &options(3, Some([2, 1, 2])));
    }

    #[test]
    fn weights_of_a_normalised_softmax_are_a_softmax_of_the_chosen_logits() {
        for [tokens, experts, top_k] in [[5, 6, 2], [3, 4, 4]] {
            let logits = constant([tokens, experts]);
            let scores = router_scores(logits.clone(), RouterScores::Softmax);
            let how = RouterOptions {
                normalise: true,
                scale: 2.5,
                ..options(top_k, None)
            };
            let plain: Vec<f32> = values(scores.clone()).iter().map(|&v| v as f32).collect();
            let chosen = choose_experts(&plain, experts, None, &how);
            let found = expert_weights(scores, &chosen, &how);
            let ids: Vec<i64> = chosen.iter().map(|&id| id as i64).collect();
            let ids = TensorData::new(ids, [tokens, top_k]);
            let ids = Tensor::<2, Int>::from_data(ids, &logits.device());
            let expected = activation::softmax(logits.gather(1, ids), 1) * 2.5;
            assert_close(found, expected, 1e-6);
        }
    }
}
