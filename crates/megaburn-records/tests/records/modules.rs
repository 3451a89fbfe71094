//! A plain module of Burn's layers, and the same with parallel ones.

use burn::{
    module::{Module, Param},
    nn,
    prelude::Device,
    tensor::{Int, Tensor, TensorData},
};
use burn_store::ModuleSnapshot;
use megaburn_collective::Group;
use megaburn_mesh::FusedPart;
use megaburn_parallel::{
    ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig,
};

/// What Burn alone has.
#[derive(Module, Debug)]
pub(crate) struct Plain {
    pub(crate) embedding: nn::Embedding,
    pub(crate) qkv: nn::Linear,
    pub(crate) layers: Vec<nn::Linear>,
    pub(crate) norm: nn::LayerNorm,
    pub(crate) steps: Param<Tensor<1, Int>>,
}

/// The same module with shards.
#[derive(Module, Sharded, Debug)]
pub(crate) struct Parallel {
    pub(crate) embedding: VocabParallelEmbedding,
    pub(crate) qkv: ParallelLinear,
    pub(crate) layers: Vec<ParallelLinear>,
    #[sharded(replicated = group)]
    pub(crate) norm: nn::LayerNorm,
    #[sharded(skip)]
    pub(crate) steps: Param<Tensor<1, Int>>,
    #[module(skip)]
    group: Group,
}

/// The layers of the plain module, which `parallelize` splits.
#[derive(Module, Sharded, Debug)]
pub(crate) struct Planned {
    pub(crate) embedding: VocabParallelEmbedding,
    pub(crate) qkv: ParallelLinear,
    pub(crate) layers: Vec<ParallelLinear>,
    #[sharded(replicated)]
    pub(crate) norm: nn::LayerNorm,
    #[sharded(skip)]
    pub(crate) steps: Param<Tensor<1, Int>>,
}

impl From<Plain> for Planned {
    fn from(plain: Plain) -> Self {
        Self {
            embedding: plain.embedding.into(),
            qkv: plain.qkv.into(),
            layers: plain.layers.into_iter().map(Into::into).collect(),
            norm: plain.norm,
            steps: plain.steps,
        }
    }
}

/// The features of the module: the vocabulary, the model, and the hidden layer.
pub(crate) type Sizes = [usize; 3];

/// Query heads and key and value heads, of three features each: fewer of these than ranks.
const HEADS: [usize; 2] = [8, 2];

impl Plain {
    pub(crate) fn new([vocabulary, d_model, hidden]: Sizes) -> Self {
        let device = Device::flex();
        let qkv = 3 * (HEADS[0] + 2 * HEADS[1]);
        Self {
            embedding: nn::EmbeddingConfig::new(vocabulary, d_model).init(&device),
            qkv: nn::LinearConfig::new(d_model, qkv)
                .with_bias(false)
                .init(&device),
            layers: vec![
                nn::LinearConfig::new(d_model, hidden).init(&device),
                nn::LinearConfig::new(hidden, d_model).init(&device),
            ],
            norm: nn::LayerNormConfig::new(d_model).init(&device),
            steps: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data([3, 1, 4], &device),
            ),
        }
    }

    /// Every tensor by its path.
    pub(crate) fn values(&self) -> Vec<(String, TensorData)> {
        let tensors = self.collect(None, None, false);
        let values = tensors.iter().map(|tensor| {
            let data = burn_store::bridge::to_data(tensor).unwrap();
            (tensor.name.clone(), data)
        });
        values.collect()
    }
}

impl Parallel {
    pub(crate) fn new(
        [vocabulary, d_model, hidden]: Sizes,
        group: &Group,
    ) -> Result<Self, ParallelError> {
        let device = Device::flex();
        let [query, key] = HEADS.map(|heads| FusedPart::units(heads, 3));
        let size = query.size() + 2 * key.size();
        let qkv = ParallelLinearConfig::column(d_model, size).with_bias(false);
        let up = ParallelLinearConfig::column(d_model, hidden).with_name("up");
        let down = ParallelLinearConfig::row(hidden, d_model).with_name("down");
        let embedding = VocabParallelEmbeddingConfig::new(vocabulary, d_model)
            .with_pad_multiple(4)
            .with_name("embedding");
        Ok(Self {
            embedding: embedding.init(group, &device)?,
            qkv: qkv
                .with_parts([query, key, key])
                .with_name("qkv")
                .init(group, &device)?,
            layers: vec![up.init(group, &device)?, down.init(group, &device)?],
            norm: nn::LayerNormConfig::new(d_model).init(&device),
            steps: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data([0, 0, 0], &device),
            ),
            group: group.clone(),
        })
    }
}
