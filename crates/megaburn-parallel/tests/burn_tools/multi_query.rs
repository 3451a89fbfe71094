//! Keys and values of one head, which all queries use, in a module that also has whole layers.

use burn::{
    module::Module,
    nn::LinearConfig,
    prelude::{Device, Int},
    tensor::{Tensor, activation::softmax},
};
use megaburn_collective::{GroupOptions, GroupShards, run_threads};
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelPlan, Sharded, parallelize, shard_plan,
};
use rstest::rstest;

use crate::parallelize::{Fill, close, grads};

/// Query heads and the features of a head.
const HEADS: [usize; 2] = [4, 3];

#[derive(Module, Sharded, Debug)]
struct Net {
    query: ParallelLinear,
    key: ParallelLinear,
    value: ParallelLinear,
    output: ParallelLinear,
    head: ParallelLinear,
}

impl Net {
    fn new(d_model: usize, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device).into();
        let [heads, features] = HEADS;
        let net = Self {
            query: linear(d_model, heads * features),
            key: linear(d_model, features),
            value: linear(d_model, features),
            output: linear(heads * features, d_model),
            head: linear(d_model, 7),
        };
        net.map(&mut Fill(0.0))
    }

    fn plan() -> ParallelPlan {
        ParallelPlan::new()
            .column("query")
            .heads(HEADS[0])
            .column("{key,value}")
            .shared_heads(1)
            .row("output")
            .heads(HEADS[0])
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let heads = |x: Tensor<3>| {
            let [batch, seq, width] = x.dims();
            let x = x.reshape([batch, seq, width / HEADS[1], HEADS[1]]);
            x.swap_dims(1, 2)
        };
        let query = heads(self.query.forward(x.clone()));
        let key = heads(self.key.forward(x.clone()));
        let value = heads(self.value.forward(x));
        let context = softmax(query.matmul(key.transpose()), 3).matmul(value);
        let [batch, own_heads, seq, features] = context.dims();
        let context = context.swap_dims(1, 2);
        let context = context.reshape([batch, seq, own_heads * features]);
        self.head.forward(self.output.forward(context))
    }
}

/// The input, whose gradient is wanted too.
fn input(d_model: usize, device: &Device) -> Tensor<3> {
    let len = (2 * 5 * d_model) as i64;
    let x = Tensor::<1, Int>::arange(0..len, &device.clone().inner()).float();
    let x = (x * 0.7).sin().reshape([2, 5, d_model]);
    Tensor::from_inner(x).require_grad()
}

#[rstest]
fn gradients_of_one_shared_head_are_those_of_one_rank(
    #[values(2, 4)] ranks: usize,
    #[values(6, 5)] d_model: usize,
) {
    let device = Device::flex().autodiff();
    let computed = |ranks| {
        let found = run_threads(ranks, GroupOptions::default(), |group| {
            let plan = Net::plan().whole("head");
            let net = parallelize(Net::new(d_model, &device), &plan, &group)?;
            let x = input(d_model, &device);
            let of_input = net.forward(x.clone()).exp().mean().backward();
            let of_input = x.grad(&of_input).unwrap();
            let logits = net.forward(x);
            let shards = GroupShards::new(&shard_plan(&net)?, &group).unwrap();
            let grads = grads(&net, logits.clone(), Some(shards));
            Ok::<_, ParallelError>((logits.into_data(), of_input.into_data(), grads))
        });
        let found = found.into_iter().map(Result::unwrap);
        found.collect::<Vec<_>>()
    };
    let (logits, of_input, of_weights) = computed(1).remove(0);
    assert_eq!(of_weights.len(), 10);
    for found in computed(ranks) {
        close(&found.0, &logits);
        close(&found.1, &of_input);
        for (path, grad) in &found.2 {
            close(grad, &of_weights[path]);
        }
    }
}

#[test]
fn a_linear_layer_next_to_a_split_has_a_pattern() {
    let found = run_threads(2, GroupOptions::default(), |group| {
        let net = Net::new(6, &Device::flex().autodiff());
        Ok::<_, ParallelError>(parallelize(net, &Net::plan(), &group).unwrap_err())
    });
    for error in found {
        let error = error.unwrap().to_string();
        let expected = "`head`: no pattern matches it, and the module has a column split";
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("name it in `whole`"), "{error}");
    }
}
