//! Context parallelism on GPUs gives the results of one GPU.

use std::{collections::BTreeMap, convert::Infallible};

use burn::tensor::{DType, Tensor, TensorData};
use megaburn::{
    collective::{Group, Lane, ProcessGroups, ReduceOp, tensors},
    kernels::RopeConfig,
    mesh::{Layout, PackedRows, PositionRng, Purpose, Zigzag},
    parallel::{
        Attention, AttentionGroups, BatchContext, ContextComm, ContextParallel, PackedDocuments,
        SelfAttentionConfig, load_params, read_params,
    },
    train::{ConfigLayers, TrainConfig, TrainError},
};

use crate::{
    GroupTest,
    layouts::{compare, train},
    ranks::this_gpu,
};
use megaburn_kernel_tests::part;
use megaburn_test_support::{
    gather::gather,
    layout_grid::EPSILON,
    text::{write_random_documents, write_random_text},
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[
    ("a_layer_is_that_of_one_gpu", exact),
    ("every_way_trains_as_one_gpu_does", ways),
    ("bf16_is_as_near_as_on_one_gpu", bf16),
];

const CONFIG: &str = "
[model]
hidden = 64
ffn = 160
layers = 3
heads = 8
kv_heads = 4
[data]
seq_len = 48
[train]
steps = 3
micro_batch = 2
global_batch = 4
[optimizer]
lr = 1e-3
warmup_steps = 0
";

fn ways(world: &Group) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("megaburn-contexts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    write_random_text(&folder.join("text.txt"), 20_000, 987);
    write_random_documents(&folder.join("documents.jsonl"), 1000, 40, 987);
    let data = |name: &str| {
        folder
            .join(name)
            .to_str()
            .expect("the folder's name is text")
            .into()
    };
    let result = train_all(world, [data("text.txt"), data("documents.jsonl")]);
    // Temporary files may stay if they cannot be removed.
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn train_all(world: &Group, data: [String; 2]) -> Result<(), String> {
    let config = |packed: bool, sets: &[&str]| -> Result<TrainConfig, TrainError> {
        let mut config = ConfigLayers::new().with_text("contexts.rs", CONFIG)?;
        // With a large epsilon, rounding errors cannot decide the sign of an update.
        let eps = format!("optimizer.eps={EPSILON}");
        let documents = format!("data.documents={packed}");
        for set in [&[&eps[..], &documents], sets].concat() {
            config = config.with_set(set)?;
        }
        config.with_data(&data[usize::from(packed)])?.load()
    };
    let text = |error: TrainError| error.to_string();
    let mut layouts = vec![Layout {
        cp: world.size(),
        ..Layout::SINGLE
    }];
    if world.size() == 4 {
        layouts.push(Layout {
            cp: 2,
            tp: 2,
            sp: true,
            ..Layout::SINGLE
        });
        layouts.push(Layout {
            cp: 2,
            pp: 2,
            ..Layout::SINGLE
        });
    }
    for packed in [false, true] {
        let one = Group::single(world.seed());
        let alone = config(packed, &["train.micro_batch=4"]).map_err(text)?;
        let (steps, params) = train(alone, &one, Layout::SINGLE).map_err(text)?;
        let expected = (steps, gather(&[params]));
        for layout in &layouts {
            for comm in ["p2p", "all_gather", "a2a", "a2a2+p2p"] {
                if comm == "a2a2+p2p" && layout.cp < 4 || !part::is_mine() {
                    continue;
                }
                let comm = format!("parallel.cp_comm=[{comm:?}]");
                let again = "recompute.method=\"uniform\"";
                let zero = "parallel.zero=3";
                let dealt = "parallel.max_tokens_per_rank=32";
                let kept = "recompute.keep_attention=true";
                let plain: &[&[&str]] = &[
                    &["parallel.zero=0"],
                    &["parallel.zero=2"],
                    &[zero, again],
                    &["parallel.zero=1", again, kept],
                ];
                let few = packed && layout.pp == 1;
                let dealt: &[&[&str]] = if few {
                    &[&[dealt], &[dealt, zero]]
                } else {
                    &[]
                };
                for sets in plain.iter().chain(dealt) {
                    let named =
                        |why: String| format!("{layout}, {comm}, {sets:?}, {packed}: {why}");
                    let sets = [&[&comm[..]], *sets].concat();
                    let config = config(packed, &sets).map_err(text)?;
                    let found = train(config, world, *layout).map_err(text).map_err(named)?;
                    compare(&found, &expected).map_err(named)?;
                }
            }
        }
    }
    Ok(())
}

const HIDDEN: usize = 256;
const HEADS: [usize; 2] = [8, 4];
const HEAD_DIM: usize = 64;

/// The output of a layer, and the gradients of its input and parameters.
type Found = BTreeMap<String, Vec<f32>>;

/// Compares in f32, three times, because a race does not show every time.
fn exact(world: &Group) -> Result<(), String> {
    for (tokens, batch, kind) in kinds().into_iter().filter(|(tokens, ..)| *tokens < 1000) {
        if !part::is_mine() {
            continue;
        }
        let shape = [tokens, batch, HIDDEN];
        let one = Group::single(world.seed());
        let alone = layer(&one, ContextComm::P2p, shape, DType::F32, &kind)?;
        for (again, comm) in (0..3).flat_map(|again| COMMS.map(|comm| (again, comm))) {
            let many = layer(world, comm, shape, DType::F32, &kind)?;
            for (name, all) in &alone {
                let expected = if all.len() == tokens * batch * HIDDEN {
                    rows_of(all, &kind.held(world, shape), shape)
                } else {
                    all.clone()
                };
                let apart = distance(&many[name], &expected);
                if apart.is_nan() || apart > 1e-5 {
                    let rows = many[name].chunks(HIDDEN).zip(expected.chunks(HIDDEN));
                    let wrong = rows.enumerate().filter(|(_, (a, b))| distance(a, b) > 1e-5);
                    let wrong: Vec<usize> = wrong.map(|(row, _)| row).collect();
                    return Err(format!(
                        "{comm}, {tokens} tokens, {kind:?}, {name}, {again} times before: {apart:.2e} from one GPU, \
                         rows {wrong:?}"
                    ));
                }
            }
        }
    }
    Ok(())
}

const COMMS: [ContextComm; 3] = [ContextComm::P2p, ContextComm::AllGather, ContextComm::A2a];

/// Tokens, sequences, and the kind of attention.
fn kinds() -> [(usize, usize, Kind); 5] {
    let plain = Kind {
        window: None,
        documents: None,
    };
    let documents = Some(vec![vec![0, 64, 96, 192], vec![0, 160, 192]]);
    [
        (4096, 1, plain.clone()),
        (192, 2, plain.clone()),
        (
            192,
            2,
            Kind {
                window: Some(70),
                ..plain.clone()
            },
        ),
        (
            192,
            2,
            Kind {
                documents: documents.clone(),
                ..plain
            },
        ),
        (
            192,
            2,
            Kind {
                window: Some(50),
                documents,
            },
        ),
    ]
}

/// In bf16, several ranks may deviate twice as far from f32 as one GPU does, whichever kernels they
/// use.
fn bf16(world: &Group) -> Result<(), String> {
    for (tokens, batch, kind) in kinds().iter().filter(|_| part::is_mine()) {
        let tokens = *tokens;
        let batch = *batch;
        let shape = [tokens, batch, HIDDEN];
        let one = Group::single(world.seed());
        let alone = |dtype| layer(&one, ContextComm::P2p, shape, dtype, kind);
        let exact = alone(DType::F32)?;
        let one = alone(DType::BF16)?;
        for comm in COMMS {
            let many = layer(world, comm, shape, DType::BF16, kind)?;
            for (name, exact) in &exact {
                let held = |all: &Vec<f32>| {
                    if all.len() == tokens * batch * HIDDEN {
                        rows_of(all, &kind.held(world, shape), shape)
                    } else {
                        all.clone()
                    }
                };
                let exact = held(exact);
                let one = held(&one[name]);
                let many = &many[name];
                let of_one = distance(&one, &exact);
                let of_many = distance(many, &exact);
                if of_many.is_nan() || of_many > 2.0 * of_one {
                    return Err(format!(
                        "{comm}, {tokens} tokens, {kind:?}, {name}: {of_many:.2e} from f32, one GPU {of_one:.2e}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Relative distance in the Euclidean norm.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = found
        .iter()
        .zip(expected)
        .map(|(a, b)| f64::from(*a) - f64::from(*b));
    norm(&mut { apart }) / norm(&mut expected.iter().map(|x| f64::from(*x)))
}

/// The kind of attention mask.
#[derive(Clone, Debug)]
struct Kind {
    window: Option<usize>,
    /// Document bounds by row.
    documents: Option<Vec<Vec<usize>>>,
}

impl Kind {
    fn documents(&self) -> Option<PackedRows> {
        self.documents
            .clone()
            .map(|rows| PackedRows::new(rows).expect("bounds that rise"))
    }

    /// The tokens of each row that this rank holds, and their positions.
    fn held(&self, group: &Group, [tokens, batch, _]: [usize; 3]) -> Vec<[Vec<usize>; 2]> {
        let zigzag = Zigzag::new(group.rank(), group.size());
        let documents = self.documents();
        let of_row = |row| match &documents {
            None => [0; 2].map(|_| zigzag.positions(tokens).collect()),
            Some(all) => [
                all.tokens(row, zigzag).collect(),
                all.positions(row, zigzag).collect(),
            ],
        };
        (0..batch).map(of_row).collect()
    }
}

/// The part of `[s, b, hidden]` that a rank holds.
fn rows_of(all: &[f32], held: &[[Vec<usize>; 2]], [_, batch, hidden]: [usize; 3]) -> Vec<f32> {
    let places = (0..held[0][0].len()).flat_map(|at| (0..batch).map(move |row| (at, row)));
    let start = |(at, row): (usize, usize)| (held[row][0][at] * batch + row) * hidden;
    places
        .map(start)
        .flat_map(|start| all[start..start + hidden].to_vec())
        .collect()
}

fn layer(
    group: &Group,
    comm: ContextComm,
    shape: [usize; 3],
    dtype: DType,
    kind: &Kind,
) -> Result<Found, String> {
    let [tokens, batch, hidden] = shape;
    let device = this_gpu().autodiff();
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let layout = Layout {
        cp: group.size(),
        ..Layout::SINGLE
    };
    let groups = ProcessGroups::new(group, layout).map_err(|error| text(&error))?;
    let parallel = ContextParallel::new(&groups.cp, comm).map_err(|error| text(&error))?;
    let mut config =
        SelfAttentionConfig::new(HIDDEN, HEADS[0], HEADS[1], HEAD_DIM).with_name("attention");
    config.window = kind.window;
    let of_layer = AttentionGroups {
        tp: groups.tp.clone(),
        cp: parallel,
    };
    let layer = config
        .init(of_layer, &device)
        .map_err(|error| text(&error))?;
    // Round to bf16 first, so that the numbers are equal in every type.
    let rounded = |data: TensorData| data.convert_dtype(DType::BF16).convert_dtype(dtype);
    let mut params: BTreeMap<_, _> = read_params(&layer).into_iter().collect();
    let next = |path: &str, _: &[usize]| {
        Ok::<_, Infallible>(rounded(
            params.remove(path).expect("each value is read once"),
        ))
    };
    let layer: Attention = match load_params(layer, next) {
        Ok(layer) => layer,
        Err(never) => match never {},
    };
    let held = kind.held(group, shape);
    let local = |what: &str| -> Tensor<3> {
        let mut all = vec![0.0f32; tokens * batch * hidden];
        PositionRng::new(5, Purpose::Sampling, what).fill_normal(0, &mut all);
        let own = rows_of(&all, &held, shape);
        let data = TensorData::new(own, [tokens / group.size(), batch, hidden]);
        Tensor::from_data(rounded(data), (&device, dtype))
    };
    let x = local("input").require_grad();
    let rope = RopeConfig::new(HEAD_DIM)
        .init(0..tokens, &device)
        .map_err(|error| text(&error))?;
    let positions: Vec<&[usize]> = held.iter().map(|held| &held[1][..]).collect();
    let rope = rope.rows(&positions);
    let batch = BatchContext {
        documents: kind.documents().map(PackedDocuments::new),
        ..BatchContext::default()
    };
    let y = layer.forward_in(x.clone(), Some(&rope), &batch);
    let mut grads = (y.clone() * local("weight")).sum().backward();
    let host = |x: Tensor<3>| -> Result<Vec<f32>, String> {
        let data = x
            .cast(DType::F32)
            .try_into_data()
            .map_err(|error| error.to_string())?;
        data.try_to_vec().map_err(|error| format!("{error:?}"))
    };
    let mut found = Found::from([("output".into(), host(y.inner())?)]);
    found.insert(
        "input gradient".into(),
        host(x.grad_remove(&mut grads).ok_or("no gradient")?)?,
    );
    let qkv = layer.qkv.as_ref().ok_or("no projection to queries")?;
    for (name, weight) in [
        ("qkv", &qkv.weight),
        ("output matrix", &layer.output.weight),
    ] {
        let gradient = weight
            .val()
            .grad(&grads)
            .ok_or("no gradient")?
            .cast(DType::F32);
        let sum = tensors::all_reduce(gradient, ReduceOp::Sum, &groups.cp, Lane::InOrder);
        found.insert(
            name.into(),
            host(sum.map_err(|error| text(&error))?.wait().unsqueeze_dim(0))?,
        );
    }
    Ok(found)
}
