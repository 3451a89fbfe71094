use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_kernels::{EmbeddingOptions, LinearOptions, embedding, linear};
use megaburn_mesh::{Axis, ShardSpec};

use crate::{
    error::ParallelError,
    init::{InitDraw, named},
    replica::Replica,
    shards::{PlanBuilder, Sharded},
};

/// A table with at most this number of vectors, such as that of token types, is read by a product
/// with one-hot rows. Its gradient is then a matrix product, too; additions of many tokens to a few
/// rows would wait for each other.
const FEW: usize = 16;

/// Configuration of a [`PositionEmbedding`].
#[derive(Config, Debug)]
pub struct PositionEmbeddingConfig {
    /// Number of positions, each with a vector.
    pub num_positions: usize,
    /// Features of a vector.
    pub d_model: usize,
    /// Whether the output is sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Initializer of the vectors.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// The layer's path in the model. Required in a group of more than one.
    pub path: Option<String>,
}

named!(PositionEmbeddingConfig);

impl PositionEmbeddingConfig {
    /// Builds the vectors, replicated on every rank.
    ///
    /// # Errors
    /// The layer has no name and the group more than one rank.
    pub fn init(&self, group: &Group, device: &Device) -> Result<PositionEmbedding, ParallelError> {
        let shape = [self.num_positions, self.d_model];
        let draw = InitDraw {
            layer: "PositionEmbedding",
            name: self.path.as_deref(),
            field: "weight",
            initializer: &self.initializer,
            fans: shape,
        };
        let spec = ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size());
        Ok(PositionEmbedding {
            weight: draw.param(&spec, group, device)?,
            path: self.path.clone(),
            replica: Replica::of(group, self.sequence_parallel),
            main_grad: MainGrad::default(),
        })
    }
}

/// Learned position embeddings: one vector per position, replicated on every rank.
///
/// Source: Radford et al. (2019), GPT-2.
/// # Collective
/// Forward: none. Backward: with sequence parallelism one all-reduce of the gradient, because each
/// rank sees its own positions only.
#[derive(Module, Debug)]
pub struct PositionEmbedding {
    /// The vectors, `[num_positions, d_model]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    path: Option<String>,
    #[module(skip)]
    replica: Replica,
    #[module(skip)]
    main_grad: MainGrad,
}

impl PositionEmbedding {
    /// Looks up the vectors of some positions, to be added to the token vectors.
    ///
    /// # Shapes
    /// One position for each of the `S` tokens of the sequence; output `[S, 1, d_model]`, with
    /// sequence parallelism `[S / n, 1, d_model]`
    ///
    /// # Panics
    /// If a position has no vector.
    pub fn forward(&self, positions: &[usize]) -> Tensor<3> {
        self.forward_each(&[positions])
    }

    /// Like [`forward`](Self::forward), for sequences with positions of their own.
    ///
    /// # Shapes
    /// `B` sequences of `S` positions; output `[S, B, d_model]`, with sequence parallelism
    /// `[S / n, B, d_model]`
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_each<P: AsRef<[usize]>>(&self, sequences: &[P]) -> Tensor<3> {
        let own: Vec<_> = sequences
            .iter()
            .map(|all| self.replica.rows(all.as_ref()))
            .collect();
        let num_positions = self.weight.dims()[0];
        for positions in &own {
            assert!(
                positions.iter().all(|&position| position < num_positions),
                "a position of {positions:?} is outside the table of {num_positions} positions"
            );
        }
        let len = own.first().map_or(0, |positions| positions.len());
        let own = &own;
        let ids = (0..len).flat_map(|at| own.iter().map(move |positions| positions[at]));
        let weight = self.replica.value(&self.weight);
        let main_grad = self.main_grad();
        if num_positions <= FEW {
            let chosen: Vec<f32> = ids
                .flat_map(|id| (0..num_positions).map(move |at| f32::from(u8::from(at == id))))
                .collect();
            let chosen = TensorData::new(chosen, [len, own.len(), num_positions]);
            let chosen = Tensor::<3>::from_data(chosen, &weight.device()).cast(weight.dtype());
            let options = LinearOptions {
                main_grad,
                ..LinearOptions::default()
            };
            return linear(chosen, weight, None, options);
        }
        let ids: Vec<i64> = ids.map(|id| id as i64).collect();
        let ids = TensorData::new(ids, [len, own.len()]);
        let ids = Tensor::<2, Int>::from_data(ids, &weight.device().inner());
        let options = EmbeddingOptions {
            first: None,
            main_grad,
        };
        embedding(weight, ids, options)
    }

    /// The main gradient; `None` if the gradient is summed over ranks first.
    fn main_grad(&self) -> Option<MainGrad> {
        (!self.replica.is_summed()).then(|| self.main_grad.clone())
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(mut self) -> Self {
        self.replica = self.replica.with_all_rows();
        self
    }
}

impl Sharded for PositionEmbedding {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.drawn_from(self.path.as_deref());
        plan.vector("weight", &self.replica.spec(&self.weight), self.main_grad());
    }
}
