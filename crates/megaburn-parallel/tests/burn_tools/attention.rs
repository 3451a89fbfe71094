//! Burn's attention, split by heads, against itself.

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::attention::{
        MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
    },
    prelude::{Bool, Device},
    tensor::{Gradients, Tensor, TensorData, Tolerance},
};
use megaburn_collective::{GroupOptions, GroupShards, run_threads};
use megaburn_parallel::{
    ParallelError, ParallelMhaInput, ParallelMultiHeadAttention, ParallelPlan, Sharded,
    parallelize, shard_plan,
};
use rstest::rstest;

#[derive(Module, Sharded, Debug)]
struct Net {
    attention: ParallelMultiHeadAttention,
}

/// Queries and other keys, with both masks.
struct Inputs {
    query: Tensor<3>,
    keys: Tensor<3>,
    padding: Tensor<2, Bool>,
    causal: Tensor<3, Bool>,
}

impl Inputs {
    fn new(d_model: usize) -> Self {
        let device = Device::flex().autodiff();
        let values = |start: f32| {
            let len = (2 * 5 * d_model) as i64;
            let x = Tensor::<1, burn::tensor::Int>::arange(0..len, &device.clone().inner()).float();
            let x = (x * 0.7 + start).sin().reshape([2, 5, d_model]);
            Tensor::from_inner(x).require_grad()
        };
        let padding = [[false; 5], [false, false, false, false, true]];
        Self {
            query: values(0.0),
            keys: values(1.0),
            padding: Tensor::from_data(padding, &device),
            causal: generate_autoregressive_mask(2, 5, &device),
        }
    }
}

/// Collects the full gradients of the weights and biases of queries, keys, values and output.
struct OfParams<'a> {
    path: Vec<String>,
    grads: &'a Gradients,
    /// The shards of a module that has the attention in a field.
    shards: Option<&'a GroupShards>,
    found: Vec<TensorData>,
}

impl<'a> OfParams<'a> {
    fn find<M: Module>(
        module: &M,
        grads: &'a Gradients,
        shards: Option<&'a GroupShards>,
    ) -> Vec<TensorData> {
        let mut visitor = Self {
            path: vec!["attention".into()],
            grads,
            shards,
            found: Vec::new(),
        };
        module.visit(&mut visitor);
        visitor.found
    }
}

impl ModuleVisitor for OfParams<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = param.val().grad(self.grads).unwrap();
        let full = match self.shards {
            Some(shards) => {
                let shards = shards.get(&self.path.join(".")).unwrap();
                shards.gather(grad).unwrap()
            }
            None => grad,
        };
        self.found.push(full.into_data());
    }
}

#[rstest]
fn burns_attention_is_split_by_heads(
    #[values(1, 2, 4)] ranks: usize,
    #[values(8, 12)] d_model: usize,
) {
    let device = Device::flex().autodiff();
    let attention = MultiHeadAttentionConfig::new(d_model, 4).with_dropout(0.0);
    let attention: MultiHeadAttention = attention.with_quiet_softmax(d_model == 8).init(&device);
    let of = Inputs::new(d_model);
    let input = MhaInput::new(of.query.clone(), of.keys.clone(), of.keys.clone());
    let input = input.mask_pad(of.padding).mask_attn(of.causal);
    let expected = attention.forward(input);
    let grads = expected.context.clone().powf_scalar(2.0).sum().backward();
    let grad = |x: &Tensor<3>, grads: &_| x.grad(grads).unwrap().into_data();
    let of_params = OfParams::find(&attention, &grads, None);
    let of_inputs = [grad(&of.query, &grads), grad(&of.keys, &grads)];
    let expected_grads: Vec<_> = of_inputs.into_iter().chain(of_params).collect();
    assert_eq!(expected_grads.len(), 10);

    let plan = ParallelPlan::new().attention("attention", 4);
    let found = run_threads(ranks, GroupOptions::default(), |group| {
        let net = Net {
            attention: attention.clone().into(),
        };
        let net = parallelize(net, &plan, &group)?;
        let of = Inputs::new(d_model);
        let input = ParallelMhaInput::new(of.query.clone(), of.keys.clone(), of.keys.clone());
        let input = input.mask_pad(of.padding).mask_attn(of.causal);
        let output = net.attention.forward(input);
        let grads = output.context.clone().powf_scalar(2.0).sum().backward();
        let shards = GroupShards::new(&shard_plan(&net)?, &group).unwrap();
        let of_params = OfParams::find(&net.attention, &grads, Some(&shards));
        let of_inputs = [grad(&of.query, &grads), grad(&of.keys, &grads)];
        let grads: Vec<_> = of_inputs.into_iter().chain(of_params).collect();
        let heads = output.weights.dims()[1];
        Ok::<_, ParallelError>((heads, output.context.into_data(), grads))
    });
    let close = |found: &TensorData, expected: &TensorData| {
        found.assert_approx_eq::<f32>(expected, Tolerance::absolute(1e-5));
    };
    for found in found {
        let (heads, context, grads) = found.unwrap();
        assert_eq!(heads, 4 / ranks);
        close(&context, &expected.context.to_data());
        assert_eq!(grads.len(), expected_grads.len());
        for (found, expected) in grads.iter().zip(&expected_grads) {
            close(found, expected);
        }
    }
}
