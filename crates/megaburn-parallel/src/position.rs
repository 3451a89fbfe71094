use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_kernels::{EmbeddingOptions, MainGrad, embedding};
use megaburn_mesh::{Axis, ShardSpec};

use crate::{ParallelError, PlanBuilder, Sharded, init::InitDraw, replica::Replica};

/// Configuration of a [`PositionEmbedding`].
#[derive(Config, Debug)]
pub struct PositionEmbeddingConfig {
    /// Positions that have a vector.
    pub num_positions: usize,
    /// Features.
    pub d_model: usize,
    /// Whether the output holds this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the vectors start.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// The layer's path in the model. Required in a group of more than one.
    pub path: Option<String>,
}

impl PositionEmbeddingConfig {
    /// The vectors, whole on every rank.
    ///
    /// # Errors
    /// No name in a group of more than one.
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

/// A learned vector a position. Every rank holds all of them.
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
    /// The vectors of some positions, to be added to the tokens'.
    ///
    /// # Shapes
    /// One position for each place of the sequence, `S` in all; output `[S, 1, d_model]`, with
    /// sequence parallelism `[S / n, 1, d_model]`
    ///
    /// # Panics
    /// If a position has no vector.
    pub fn forward(&self, positions: &[usize]) -> Tensor<3> {
        self.forward_each(&[positions])
    }

    /// The same for sequences that have positions of their own.
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
                "a position of {positions:?} has none of {num_positions} vectors"
            );
        }
        let len = own.first().map_or(0, |positions| positions.len());
        let ids = (0..len).flat_map(|at| own.iter().map(move |positions| positions[at] as i64));
        let ids = TensorData::new(ids.collect::<Vec<_>>(), [len, own.len()]);
        let ids = Tensor::<2, Int>::from_data(ids, &self.weight.device().inner());
        let options = EmbeddingOptions {
            first: None,
            main_grad: self.main_grad(),
        };
        embedding(self.replica.value(&self.weight), ids, options)
    }

    /// Where the gradient is summed; nowhere if it is summed over ranks first.
    fn main_grad(&self) -> Option<MainGrad> {
        (!self.replica.is_summed()).then(|| self.main_grad.clone())
    }

    /// The same layer and weights for whole sequences, as generation needs it.
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
