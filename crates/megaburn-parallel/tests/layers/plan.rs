//! Shard plans of a model of parallel layers and plain Burn layers.

use burn::{
    module::Module,
    nn,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::Group;
use megaburn_mesh::{Axis, ParamSpec, PositionRng, Purpose, ShardPlan, ShardSpec};
use megaburn_parallel::{
    Attention, Mlp, MlpConfig, Norm, NormConfig, ParallelError, ParallelLinear,
    ParallelLinearConfig, PlanBuilder, SelfAttentionConfig, Sharded, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig, check_plan, read_params, shard_plan,
};
use rstest::rstest;

use crate::{
    support::{assert_bits, autodiff, cut, fresh_seed, on_ranks},
    trial::{Setting, assert_same_under_layout, stream},
};

#[derive(Module, Sharded, Debug)]
struct Block {
    norm: Norm,
    attention: Attention,
    mlp: Mlp,
}

#[derive(Module, Sharded, Debug)]
pub(crate) struct Model {
    embedding: VocabParallelEmbedding,
    blocks: Vec<Block>,
    /// A plain Burn layer, replicated on every rank.
    #[sharded(replicated = group)]
    scale: nn::LayerNorm,
    pub(crate) head: Option<ParallelLinear>,
    #[module(skip)]
    group: Group,
}

impl Model {
    pub(crate) fn new(group: &Group) -> Result<Self, ParallelError> {
        let device = autodiff();
        let block = |index| {
            let name = format!("blocks.{index}");
            let attention = SelfAttentionConfig::new(6, 4, 2, 2).with_qkv_bias(true);
            let mlp = MlpConfig::gated(6, 8).with_name(format!("{name}.mlp"));
            Ok(Block {
                norm: NormConfig::rms(6).init(group, &device),
                attention: attention
                    .with_name(format!("{name}.attention"))
                    .init(group, &device)?,
                mlp: mlp.init(group, &device)?,
            })
        };
        let embedding = VocabParallelEmbeddingConfig::new(13, 6).with_pad_multiple(2);
        let head = ParallelLinearConfig::new(6, 8).with_name("head");
        Ok(Self {
            embedding: embedding.with_name("embedding").init(group, &device)?,
            blocks: (0..2).map(block).collect::<Result<_, ParallelError>>()?,
            scale: nn::LayerNormConfig::new(6).init(&device),
            head: Some(head.init(group, &device)?),
            group: group.clone(),
        })
    }

    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let mut x = x;
        for block in &self.blocks {
            x = x.clone() + block.mlp.forward(block.norm.forward(x));
        }
        self.head.as_ref().unwrap().forward(self.scale.forward(x))
    }
}

#[rstest]
fn the_plan_names_every_parameter_with_its_whole_shape(#[values(1, 2, 4)] ranks: usize) {
    let plans = on_ranks(ranks, 0, |group| {
        shard_plan(&Model::new(&group).unwrap()).unwrap()
    });
    for plan in &plans {
        let found: Vec<_> = plan
            .iter()
            .map(|(path, spec)| (path, spec.shard.global_shape.as_slice()))
            .collect();
        let block: [(&str, &[usize]); 6] = [
            ("attention.output.weight", &[8, 6]),
            ("attention.qkv.bias", &[16]),
            ("attention.qkv.weight", &[6, 16]),
            ("mlp.down.weight", &[8, 6]),
            ("mlp.up.weight", &[6, 16]),
            ("norm.gamma", &[6]),
        ];
        let blocks = (0..2)
            .flat_map(|index| block.map(|(path, shape)| (format!("blocks.{index}.{path}"), shape)));
        let rest: [(&str, &[usize]); 5] = [
            ("embedding.weight", &[13, 6]),
            ("head.bias", &[8]),
            ("head.weight", &[6, 8]),
            ("scale.beta", &[6]),
            ("scale.gamma", &[6]),
        ];
        let expected: Vec<_> = blocks
            .chain(rest.map(|(path, shape)| (path.to_string(), shape)))
            .collect();
        assert_eq!(
            found,
            expected
                .iter()
                .map(|(p, s)| (p.as_str(), *s))
                .collect::<Vec<_>>()
        );
    }
    // Each rank holds another replica; the first one is the owner.
    for (rank, plan) in plans.iter().enumerate() {
        let piece = &plan.get("scale.gamma").unwrap().shard.pieces[0];
        assert_eq!((piece.replica, piece.replicas), (rank, ranks));
    }
}

#[rstest]
fn a_weight_is_drawn_from_its_path_in_the_plan(#[values(1, 2, 4)] ranks: usize) {
    let seed = fresh_seed();
    on_ranks(ranks, seed, |group| {
        let model = Model::new(&group).unwrap();
        let plan = shard_plan(&model).unwrap();
        let mut drawn = 0;
        for (path, data) in read_params(&model) {
            let spec = &plan.get(&path).unwrap().shard;
            if spec.global_shape.len() < 2 || path.starts_with("head") {
                continue; // biases and norms are constant, and the head has another initializer
            }
            let mut whole = vec![0.0; spec.num_global()];
            PositionRng::new(seed, Purpose::Init, &path).fill_normal(0, &mut whole);
            whole.iter_mut().for_each(|x| *x *= 0.02);
            let whole = TensorData::new(whole, spec.global_shape.clone());
            assert_bits(&path, &data, &cut(&whole, spec, false));
            drawn += 1;
        }
        assert_eq!(drawn, 9);
    });
}

#[rstest]
fn a_model_with_plain_burn_layers_is_the_same_everywhere(#[values(1, 2, 4)] ranks: usize) {
    // Attention and embedding are left out here; they have tests of their own.
    #[derive(Module, Debug)]
    struct Used {
        mlp: Mlp,
        scale: nn::LayerNorm,
        head: Option<ParallelLinear>,
        #[module(skip)]
        group: Group,
    }
    impl Sharded for Used {
        fn shards(&self, plan: &mut PlanBuilder) {
            plan.child("mlp", &self.mlp);
            plan.replicated("scale", &self.scale, &self.group);
            plan.child("head", self.head.as_ref().unwrap());
        }
    }
    let build = |group: &Group| {
        let Model {
            mut blocks,
            scale,
            head,
            group,
            ..
        } = Model::new(group)?;
        Ok(Used {
            mlp: blocks.remove(0).mlp,
            scale,
            head,
            group,
        })
    };
    let forward = |model: &Used, x: Tensor<3>| {
        let x = x.clone() + model.mlp.forward(x);
        model.head.as_ref().unwrap().forward(model.scale.forward(x))
    };
    let shapes = [[4, 3, 6], [4, 3, 8]];
    let ends = [stream(false), stream(false)];
    assert_same_under_layout(
        &Setting {
            ranks,
            seed: fresh_seed(),
            shapes,
            ends,
        },
        build,
        forward,
    );
}

/// The plan without one parameter.
fn without(plan: &ShardPlan, missing: &str) -> ShardPlan {
    let mut rest = ShardPlan::new();
    for (path, spec) in plan.iter().filter(|(path, _)| *path != missing) {
        rest.insert(path, spec.clone()).unwrap();
    }
    rest
}

fn whole(shape: &[usize]) -> ParamSpec {
    ParamSpec {
        shard: ShardSpec::whole(shape, Axis::Tp, 0, 1),
    }
}

#[test]
fn a_plan_that_does_not_describe_the_module_is_refused() {
    let model = Model::new(&Group::single(0)).unwrap();
    let plan = shard_plan(&model).unwrap();
    let refused = |plan: ShardPlan, why: &str| {
        let message = check_plan(&model, &plan).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("the shard plan does not describe the module: {why}")
        );
    };
    refused(
        without(&plan, "head.bias"),
        "parameter `head.bias` is missing from it",
    );
    let mut surplus = plan.clone();
    surplus.insert("tail", whole(&[2])).unwrap();
    refused(surplus, "the module has no parameter `tail`");
    let mut other = without(&plan, "head.bias");
    other.insert("head.bias", whole(&[9])).unwrap();
    refused(
        other,
        "`head.bias` is [8] in the module, but [9] in the plan",
    );
}

#[test]
fn two_parameters_of_one_name_are_refused() {
    #[derive(Module, Debug)]
    struct Twice {
        norm: Norm,
    }
    impl Sharded for Twice {
        fn shards(&self, plan: &mut PlanBuilder) {
            plan.child("norm", &self.norm);
            plan.child("norm", &self.norm);
        }
    }
    let twice = Twice {
        norm: NormConfig::rms(2).init(&Group::single(0), &autodiff()),
    };
    let message = shard_plan(&twice).unwrap_err().to_string();
    assert!(
        message.ends_with("two parameters are named `norm.gamma`"),
        "{message}"
    );
}

#[test]
fn two_layers_of_one_name_are_refused() {
    #[derive(Module, Debug)]
    struct Pair {
        tokens: VocabParallelEmbedding,
        up: ParallelLinear,
    }
    impl Sharded for Pair {
        fn shards(&self, plan: &mut PlanBuilder) {
            plan.child("tokens", &self.tokens);
            plan.child("up", &self.up);
        }
    }
    let pair = |names: [&str; 2]| {
        let group = Group::single(0);
        let device = autodiff();
        let tokens = VocabParallelEmbeddingConfig::new(4, 4).with_name(names[0]);
        let up = ParallelLinearConfig::new(4, 4).with_name(names[1]);
        Pair {
            tokens: tokens.init(&group, &device).unwrap(),
            up: up.init(&group, &device).unwrap(),
        }
    };
    shard_plan(&pair(["tokens", "up"])).unwrap();
    assert_eq!(
        shard_plan(&pair(["up", "up"])).unwrap_err().to_string(),
        "layers `tokens` and `up` are both named `up` and would be initialized with the same weights: name each by its own path"
    );
}
