//! Buckets of layouts that the fixtures do not have, written here as Megatron-Core's source says.

use std::{collections::BTreeSet, io::Write, ops::Range, path::Path};

use megaburn_test_support::text::fresh_seed;
use megaburn_torch::{
    DType,
    dcp::{DcpDir, DcpWriter},
    megatron::write_iteration,
    pickle::Tree,
    pt::PtFile,
};
use rstest::rstest;

use super::{buckets::differences, fixture, import, inner, set};

/// A layout, and the order of parameters.
#[derive(Clone)]
struct Layout {
    tp: usize,
    pp: usize,
    ep: usize,
    etp: usize,
    /// The layers of each stage. There may be several for each rank of the pipeline.
    stages: Vec<Range<usize>>,
    /// The parameters of a layer that is not of experts, in the order of the model.
    layer: Vec<&'static str>,
    /// Whether the first matrices of all experts come first.
    is_grouped: bool,
    /// Whether the first chunk of a rank has an optimizer of its own.
    has_two_optimizers: bool,
}

const LOCAL: [&str; 15] = [
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.layer_norm_bias",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.router.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
];

impl Layout {
    /// A layout whose stages have these numbers of layers.
    fn new(tp: usize, pp: usize, layers: &[usize]) -> Self {
        let mut first = 0;
        let stages = layers.iter().map(|count| {
            first += count;
            first - count..first
        });
        Self {
            tp,
            pp,
            ep: 1,
            etp: tp,
            stages: stages.collect(),
            layer: LOCAL.to_vec(),
            is_grouped: false,
            has_two_optimizers: false,
        }
    }

    fn with_experts(mut self, ep: usize, etp: usize) -> Self {
        (self.ep, self.etp) = (ep, etp);
        self
    }

    fn with_transformer_engine(mut self, is_grouped: bool) -> Self {
        self.layer.rotate_left(2);
        let norms = self.layer.split_off(LOCAL.len() - 2);
        self.layer.splice(2..2, norms);
        self.is_grouped = is_grouped;
        self
    }

    fn with_two_optimizers(mut self) -> Self {
        self.has_two_optimizers = true;
        self
    }
}

/// A parameter that a rank has: the tensor, and the layer and the expert, if it has such dims.
type Local = (String, Vec<usize>);

/// The tensors of a checkpoint by parameter.
struct Original {
    dir: DcpDir,
    num_experts: usize,
    is_tied: bool,
}

impl Original {
    fn has(&self, name: &str) -> bool {
        self.dir.tensor(name).is_ok()
    }

    /// The parameters of a stage in the order of the model: those of all layers, and experts.
    fn stage(&self, layout: &Layout, stage: usize, ep: usize) -> (Vec<Local>, Vec<Local>) {
        let (mut dense, mut experts) = (Vec::new(), Vec::new());
        let mut whole = |name: &str| {
            if self.has(name) {
                dense.push((name.to_string(), Vec::new()));
            }
        };
        if stage == 0 {
            whole("embedding.word_embeddings.weight");
            whole("embedding.position_embeddings.weight");
        }
        for layer in layout.stages[stage].clone() {
            for name in &layout.layer {
                let name = format!("decoder.layers.{name}");
                if self.has(&name) {
                    dense.push((name, vec![layer]));
                }
            }
            let of_rank = self.num_experts / layout.ep;
            let mut of_layer = Vec::new();
            for expert in ep * of_rank..(ep + 1) * of_rank {
                for matrix in [1, 2] {
                    let name =
                        format!("decoder.layers.mlp.experts.experts.linear_fc{matrix}.weight");
                    of_layer.push((name, vec![layer, expert]));
                }
            }
            if layout.is_grouped {
                of_layer.sort();
            }
            if layout.ep > 1 {
                &mut experts
            } else {
                &mut dense
            }
            .extend(of_layer);
        }
        let last = layout.stages.len() - 1;
        if stage == last {
            for name in [
                "decoder.final_layernorm.weight",
                "decoder.final_layernorm.bias",
            ] {
                if self.has(name) {
                    dense.push((name.into(), Vec::new()));
                }
            }
            if self.has("output_layer.weight") {
                dense.push(("output_layer.weight".into(), Vec::new()));
            }
            if self.is_tied && last > 0 {
                dense.push(("embedding.word_embeddings.weight".into(), Vec::new()));
            }
        }
        (dense, experts)
    }

    /// The values that a rank of tensor parallelism has of a parameter.
    fn values(
        &self,
        state: &str,
        (name, index): &Local,
        rank: usize,
        ranks: usize,
    ) -> Vec<[u8; 4]> {
        let tensor = format!("optimizer.state.{state}.{name}");
        let shape = self.dir.tensor(&tensor).unwrap().shape().to_vec();
        let inner = &shape[index.len()..];
        let offsets = [index.clone(), vec![0; inner.len()]].concat();
        let sizes = [vec![1; index.len()], inner.to_vec()].concat();
        let bytes = self.dir.read_region(&tensor, &offsets, &sizes).unwrap();
        let at = |row: usize, column: usize, columns: usize| {
            let start = (row * columns + column) * 4;
            bytes[start..start + 4].try_into().unwrap()
        };
        let (height, width) = (inner[0], inner.get(1).copied().unwrap_or(1));
        let part = |len: usize| rank * len / ranks..(rank + 1) * len / ranks;
        let is_gated = name.ends_with("linear_fc1.weight") && !self.is_tied;
        let (mut rows, mut columns): (Vec<usize>, _) = ((0..height).collect(), 0..width);
        if is_gated {
            let up = part(height / 2).map(|row| row + height / 2);
            rows = part(height / 2).chain(up).collect();
        } else if [
            "linear_qkv.weight",
            "linear_qkv.bias",
            "linear_fc1.weight",
            "linear_fc1.bias",
        ]
        .iter()
        .any(|end| name.ends_with(end))
            || name.contains("word_embeddings")
            || name.contains("output_layer")
        {
            rows = part(height).collect();
        } else if ["linear_proj.weight", "linear_fc2.weight"]
            .iter()
            .any(|end| name.ends_with(end))
        {
            columns = part(width);
        }
        let values = rows.into_iter().flat_map(|row| {
            let at = &at;
            columns.clone().map(move |column| at(row, column, width))
        });
        values.collect()
    }

    /// The buckets of a rank, with a state.
    fn buckets(
        &self,
        state: &str,
        locals: &[Local],
        (rank, ranks): (usize, usize),
        bucket_size: usize,
        random: &mut fastrand::Rng,
    ) -> Vec<Vec<u8>> {
        let mut buckets = vec![Vec::new()];
        let pad = |bucket: &mut Vec<[u8; 4]>, random: &mut fastrand::Rng| {
            while !bucket.len().is_multiple_of(64) {
                bucket.push(random.u32(..).to_le_bytes());
            }
        };
        for local in locals.iter().rev() {
            let is_shared = self.is_tied && local.0.contains("word_embeddings");
            let bucket = buckets.last_mut().unwrap();
            pad(bucket, random);
            if is_shared && !bucket.is_empty() {
                buckets.push(Vec::new());
            }
            let bucket = buckets.last_mut().unwrap();
            bucket.extend(self.values(state, local, rank, ranks));
            if bucket.len() >= bucket_size || is_shared {
                buckets.push(Vec::new());
            }
        }
        buckets.retain(|bucket| !bucket.is_empty());
        buckets.into_iter().map(|bucket| bucket.concat()).collect()
    }
}

/// Writes a fixture that is by parameter as a checkpoint of a layout whose optimizer is in buckets.
fn write(to: &Path, name: &str, layout: &Layout, random: &mut fastrand::Rng) {
    let from = fixture(name).join("iter_0000010");
    let dir = DcpDir::open(&from).unwrap();
    let experts = dir.tensor("decoder.layers.mlp.router.weight");
    let original = Original {
        num_experts: experts.map_or(0, |router| router.shape()[1]),
        is_tied: dir.tensor("output_layer.weight").is_err(),
        dir,
    };
    let mut writer = DcpWriter::create(to, 0).unwrap();
    let mut tensor = |name: &str, dtype, shape: &[usize], bytes: &[u8]| {
        let write = |out: &mut dyn Write| out.write_all(bytes);
        let zeros = vec![0; shape.len()];
        writer
            .tensor(name, dtype, shape, &zeros, shape, write)
            .unwrap();
    };
    for (name, of) in original.dir.tensors() {
        if !name.starts_with("optimizer.") {
            tensor(
                name,
                of.dtype(),
                of.shape(),
                &original.dir.read(name).unwrap(),
            );
        }
    }
    let mut groups = BTreeSet::new();
    let is_chained = layout.ep > 1 || layout.has_two_optimizers;
    let mut rank = |stage: usize, ranks: [usize; 2], locals: &[Local], of_experts: bool| {
        let (group, chunk) = (stage % layout.pp, stage / layout.pp);
        let [outer, (of_tp, tp)] = match of_experts {
            true => [(ranks[0], layout.ep), (ranks[1], layout.etp)],
            false => [(0, 1), (ranks[1], layout.tp)],
        };
        let group = (group * outer.1 + outer.0) * tp + of_tp;
        let is_second = layout.has_two_optimizers && chunk > 0;
        let (optimizer, buffer) = match (of_experts, is_second) {
            (true, _) => (if layout.has_two_optimizers { 2 } else { 1 }, chunk),
            (false, true) => (1, chunk - 1),
            (false, false) => (0, chunk),
        };
        let prefix = if is_chained {
            format!("chained_{optimizer}.")
        } else {
            String::new()
        };
        let key = format!("{prefix}optimizer.distributed.dp_group_idx_{group}");
        let size = random.usize(1..6000);
        for state in ["param", "exp_avg", "exp_avg_sq"] {
            let buckets = original.buckets(state, locals, (of_tp, tp), size, random);
            for (index, bytes) in buckets.into_iter().enumerate() {
                let name = format!(
                    "{key}.gbuf_idx_{buffer}.dtype_(torch.float32, torch.float32).bucket_idx_{index}\
                    .{state}"
                );
                tensor(&name, DType::F32, &[bytes.len() / 4], &bytes);
            }
        }
        groups.insert(format!("{key}.optimizer/shard_0_1"));
    };
    for stage in 0..layout.stages.len() {
        for tp in 0..layout.tp {
            rank(stage, [0, tp], &original.stage(layout, stage, 0).0, false);
        }
        if layout.ep > 1 {
            for ep in 0..layout.ep {
                for etp in 0..layout.etp {
                    rank(stage, [ep, etp], &original.stage(layout, stage, ep).1, true);
                }
            }
        }
    }
    for name in &groups {
        let group = Tree::Dict(vec![("step".into(), 10.into())]);
        let group = Tree::Dict(vec![("param_groups".into(), Tree::List(vec![group]))]);
        writer.object(name, &Tree::List(vec![group]), &[]).unwrap();
    }
    let common = PtFile::open(from.join("common.pt")).unwrap();
    let Tree::Dict(mut common) = Tree::copy_of(common.root(), 100_000).unwrap() else {
        panic!("common.pt is a dict");
    };
    let form = vec![("param_state_sharding_type".into(), "dp_reshardable".into())];
    set(&mut common, "optimizer", Tree::Dict(form));
    let args = inner(&mut common, "args");
    for (name, degree) in [
        ("tensor_model_parallel_size", layout.tp),
        ("pipeline_model_parallel_size", layout.pp),
        ("expert_model_parallel_size", layout.ep),
        ("expert_tensor_parallel_size", layout.etp),
        ("data_parallel_size", layout.ep * layout.etp),
    ] {
        set(args, name, i64::try_from(degree).unwrap());
    }
    let common = Tree::Dict(common);
    write_iteration(to, &[writer.finish().unwrap()], &common, &[]).unwrap();
}

#[rstest]
#[case::one_rank("tp2-dp2", Layout::new(1, 1, &[2]))]
#[case::pipeline("tp2-dp2", Layout::new(2, 2, &[1, 1]))]
#[case::uneven_pipeline("tp2-dp2", Layout::new(1, 2, &[2, 0]))]
#[case::stages_without_layers("tp2-dp2", Layout::new(2, 2, &[0, 1, 1, 0]))]
#[case::two_optimizers("tp2-dp2", Layout::new(1, 2, &[0, 1, 1, 0]).with_two_optimizers())]
#[case::engine("tp2-dp2", Layout::new(2, 1, &[2]).with_transformer_engine(false))]
#[case::experts_with_the_rest("dp2-ep2", Layout::new(2, 2, &[1, 1]))]
#[case::grouped_with_the_rest("dp2-ep2", Layout::new(1, 1, &[2]).with_transformer_engine(true))]
#[case::experts("dp2-ep2", Layout::new(2, 2, &[1, 1]).with_experts(4, 1))]
#[case::divided_experts("dp2-ep2", Layout::new(1, 2, &[1, 1]).with_experts(2, 2))]
#[case::grouped(
    "dp2-ep2",
    Layout::new(1, 1, &[2]).with_experts(2, 1).with_transformer_engine(true)
)]
#[case::tied("tied-pp2-dp2", Layout::new(2, 1, &[2]))]
#[case::tied_stages("tied-pp2-dp2", Layout::new(2, 2, &[0, 1, 1, 0]))]
#[case::tied_engine("tied-pp2-dp2", Layout::new(1, 2, &[2, 0]).with_transformer_engine(false))]
fn buckets_of_every_layout_are_read(#[case] name: &str, #[case] layout: Layout) {
    let mut random = fastrand::Rng::with_seed(fresh_seed());
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(&at("iter"), name, &layout, &mut random);
    import(&at("iter"), &at("a")).unwrap();
    import(&fixture(name), &at("b")).unwrap();
    assert_eq!(differences(&at("a"), &at("b")), Vec::<String>::new());
}

/// No order that Megatron-Core does not have is taken, although its lengths are right.
#[rstest]
fn an_order_that_is_not_known_is_refused(#[values(1, 2)] tp: usize) {
    let mut random = fastrand::Rng::with_seed(fresh_seed());
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut layout = Layout::new(tp, 1, &[2]);
    layout.layer.swap(2, 4);
    write(&at("iter"), "tp2-dp2", &layout, &mut random);
    let text = import(&at("iter"), &at("run")).unwrap_err().to_string();
    assert!(
        text.contains("--dist-ckpt-optim-fully-reshardable"),
        "{text}"
    );
    assert!(text.contains("--weights-only"), "{text}");
    assert!(!at("run").exists());
}
