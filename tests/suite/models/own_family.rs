//! A family that this program registers, with an output head and a loss of its own.

use std::{collections::BTreeMap, convert::Infallible, sync::LazyLock};

use burn::{
    module::{Module, ModuleVisitor, Param},
    prelude::{Device, Int},
    tensor::{
        Gradients, Tensor, TensorData,
        activation::{gelu, log_softmax},
    },
};
use megaburn::{
    collective::Group,
    family::*,
    kernels,
    mesh::{Layout, PositionRng, Purpose},
    models::{Decoder, decoder::ModelOptions},
    parallel::{BatchContext, load_params},
    train::{ConfigLayers, Exit, TrainConfig, TrainError},
};
use megaburn_test_support::{
    gather::relative_distance,
    layout_grid::{EPSILON, STEPS},
    text::{fresh_seed, write_random_text},
};
use rstest::rstest;
use serde_json::json;

use crate::layouts::grid::{compare, train};

/// A decoder with the head of BERT's masked language model and the focal loss, whose factor is the
/// squared probability of the other tokens.
///
/// Source: Lin et al., "Focal loss for dense object detection" (2017).
struct Masked;

static FAMILY: LazyLock<Family> = LazyLock::new(|| Family::register(&Masked).unwrap());

impl ModelFamily for Masked {
    fn model_type(&self) -> &'static str {
        "masked"
    }

    fn architecture(&self) -> &'static str {
        "MaskedForCausalLM"
    }

    fn template(&self) -> DecoderConfig {
        DecoderConfig {
            norm: NormKind::Layer,
            tied: true,
            ..Family::LLAMA.template()
        }
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        &[KEYS, LLAMA_KEYS]
    }

    fn defaults(&self) -> &'static [&'static [KeyDefault]] {
        &[LLAMA_DEFAULTS]
    }

    fn read(&self, json: &HfJson<'_>) -> Result<DecoderConfig, String> {
        Ok(DecoderConfig {
            positions: Positions::Rotary(json.rotary()?),
            norm_eps: json.number("rms_norm_eps")?,
            ..read_plain_sizes(json, self.template())?
        })
    }

    fn write(&self, config: &DecoderConfig) -> Value {
        write_llama_sizes(config)
    }

    fn head(&self) -> Option<HeadInit> {
        Some(|parts| {
            let hidden = parts.config().hidden;
            Ok(FamilyHead::new(MaskedHead {
                dense: parts.linear("dense", hidden, hidden)?,
                norm: parts.norm(),
                vocab: parts.vocab_bias()?,
            }))
        })
    }

    fn loss(&self) -> Option<TokenLosses> {
        Some(|of| {
            let losses = of.cross_entropy.forward(of.logits, of.labels);
            let missed = losses.clone().neg().exp().neg() + 1.0;
            missed.powi_scalar(2) * losses
        })
    }
}

const KEYS: &[Key] = &[
    Key::plain("norm.beta", "model.norm.bias"),
    Key::plain(
        "blocks.*.attention_norm.beta",
        "model.layers.*.input_layernorm.bias",
    ),
    Key::plain(
        "blocks.*.mlp_norm.beta",
        "model.layers.*.post_attention_layernorm.bias",
    ),
    Key::linear("output_head.dense.weight", &["predictions.dense.weight"]),
    Key::plain("output_head.dense.bias", "predictions.dense.bias"),
    Key::plain("output_head.norm.gamma", "predictions.norm.weight"),
    Key::plain("output_head.norm.beta", "predictions.norm.bias"),
    Key::plain("output_head.vocab.bias", "predictions.bias"),
];

#[derive(Module, Sharded, Debug)]
struct MaskedHead {
    dense: ReplicatedLinear,
    norm: Norm,
    vocab: VocabParallelBias,
}

impl OutputHead for MaskedHead {
    fn logits(&self, x: Tensor<3>, output: &VocabParallelEmbedding) -> Tensor<3> {
        let x = self.norm.forward(kernels::gelu(self.dense.forward(x)));
        output.logits_with_bias(x, &self.vocab)
    }
}

/// A small model with random values in all parameters, also in those that start at zero or one.
fn model(config: &DecoderConfig) -> Decoder {
    let device = Device::flex().autodiff();
    let model = config.init(&Group::single(0), &ModelOptions::default(), &device);
    let value = |path: &str, shape: &[usize]| {
        let rng = PositionRng::new(fresh_seed(), Purpose::Init, path);
        let len = shape.iter().product::<usize>() as u64;
        let values: Vec<f32> = (0..len)
            .map(|at| rng.below(at, 1000) as f32 / 1000.0 - 0.4)
            .collect();
        Ok::<_, Infallible>(TensorData::new(values, shape.to_vec()))
    };
    load_params(model.unwrap(), value).unwrap()
}

fn ids(shape: [usize; 2], vocab: usize, factor: usize, ignored: usize) -> Tensor<2, Int> {
    let id = |at: usize| match at % 7 < ignored {
        true => -100,
        false => (at * factor % vocab) as i64,
    };
    let ids: Vec<i64> = (0..shape[0] * shape[1]).map(id).collect();
    let device = Device::flex().autodiff();
    Tensor::from_data(TensorData::new::<i64, _>(ids, shape), &device)
}

/// The parameters of a model as vectors that are part of the graph, and their gradients.
#[derive(Default)]
struct Params<'a> {
    path: Vec<String>,
    grads: Option<&'a Gradients>,
    values: BTreeMap<String, Tensor<1>>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Params<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if let Some(grads) = self.grads {
            let grad = param.val().grad(grads).unwrap();
            self.found
                .insert(path.clone(), grad.into_data().try_to_vec().unwrap());
        }
        self.values.insert(path, param.val().flatten(0, D - 1));
    }
}

/// The gradients of a loss, by parameter.
fn grads_of(model: &Decoder, loss: Tensor<1>) -> BTreeMap<String, Vec<f32>> {
    let grads = loss.backward();
    let mut params = Params {
        grads: Some(&grads),
        ..Params::default()
    };
    model.visit(&mut params);
    params.found
}

/// The logits and the loss of a model with the masked head, in plain tensor operations.
fn reference(
    model: &Decoder,
    tokens: Tensor<2, Int>,
    labels: Tensor<2, Int>,
) -> (Tensor<3>, Tensor<1>) {
    let DecoderConfig {
        vocab,
        hidden,
        norm_eps,
        ..
    } = *model.config();
    let mut params = Params::default();
    model.visit(&mut params);
    let param = |path: &str| params.values[path].clone();
    let row = |path: &str| param(path).reshape([1, -1]);
    let batch = BatchContext::default();
    let x = model.forward_stage(0, model.embed(tokens.clone(), &batch), &batch);
    let x = x.normed(model.norm.as_ref().unwrap()).into_tensor();
    let [seq, samples] = tokens.dims();
    let x = x.reshape([seq * samples, hidden]);
    let dense = param("output_head.dense.weight").reshape([hidden, hidden]);
    let x = gelu(x.matmul(dense) + row("output_head.dense.bias"));
    let centred = x.clone() - x.mean_dim(1);
    let variance = centred.clone().powi_scalar(2).mean_dim(1);
    let x = centred / (variance + norm_eps).sqrt();
    let x = x * row("output_head.norm.gamma") + row("output_head.norm.beta");
    let vectors = param("embedding.weight").reshape([-1, hidden as i32]);
    let logits = x.matmul(vectors.transpose()) + row("output_head.vocab.bias");
    let logits = logits.narrow(1, 0, vocab);
    let labels = labels.reshape([seq * samples, 1]);
    let is_ignored = labels.clone().equal_elem(-100);
    let log_prob = log_softmax(logits.clone(), 1).gather(1, labels.clamp_min(0));
    let losses = (log_prob.clone().exp().neg() + 1.0).powi_scalar(2) * log_prob.neg();
    let loss = losses.mask_fill(is_ignored, 0.0).sum();
    (logits.reshape([seq, samples, vocab]), loss)
}

#[rstest]
#[case([8, 2], 128, 16)]
#[case([5, 3], 37, 12)]
fn head_and_loss_equal_plain_tensors(
    #[case] shape: [usize; 2],
    #[case] vocab: usize,
    #[case] hidden: usize,
) {
    let config = DecoderConfig {
        vocab,
        hidden,
        ffn: 24,
        layers: 2,
        heads: 2,
        head_dim: 6,
        ..FAMILY.template()
    };
    let model = model(&config);
    let tokens = ids(shape, vocab, 5, 0);
    let labels = ids(shape, vocab, 11, 2);
    let (logits, loss) = reference(&model, tokens.clone(), labels.clone());
    let found = model.full_logits(tokens.clone());
    let values = |tensor: Tensor<3>| tensor.into_data().try_to_vec::<f32>().unwrap();
    let [found, expected] = [found, logits].map(values);
    let off = relative_distance(&found, &expected);
    assert!(off < 1e-5, "the logits differ by {off:e}");

    let own = model.loss(tokens, labels);
    let [found, expected] = [own.clone(), loss.clone()].map(|loss| loss.into_scalar::<f32>());
    assert!(
        (found - expected).abs() < 1e-5 * expected,
        "loss {found}, in plain tensors {expected}"
    );
    let [found, expected] = [own, loss].map(|loss| grads_of(&model, loss));
    assert!(found.contains_key("output_head.vocab.bias"));
    assert!(found.keys().eq(expected.keys()));
    for (path, grad) in &found {
        let off = relative_distance(grad, &expected[path]);
        assert!(off < 1e-4, "the gradient of {path} differs by {off:e}");
    }
}

#[test]
fn generation_with_the_cache_uses_the_head() {
    let config = FAMILY.template();
    let model = model(&config);
    let tokens = [3u32, 250, 7, 7, 19];
    let ids = tokens.map(i64::from).to_vec();
    let device = Device::flex();
    let ids = Tensor::from_data(TensorData::new(ids, [tokens.len(), 1]), &device);
    let model = model.for_generation();
    let all = model.full_logits(ids).narrow(0, tokens.len() - 1, 1);
    let mut cache = model.cache(1);
    model.next_logits(&[(0, &tokens[..3])], &mut cache, &device);
    let last = model.next_logits(&[(0, &tokens[3..])], &mut cache, &device);
    let [found, expected] = [last, all].map(|x| x.into_data().try_to_vec::<f32>().unwrap());
    let off = relative_distance(&found, &expected);
    assert!(off < 1e-5, "the logits differ by {off:e}");
}

fn layers(data: &str, micro_batch: u64, sets: &[&str]) -> Result<ConfigLayers, TrainError> {
    let family = *FAMILY;
    let text = format!(
        "[model]\nfamily = \"{family}\"\nhidden = 16\nffn = 24\nheads = 4\nlayers = 4
        [data]\npath = {data:?}\nseq_len = 16
        [train]\nsteps = {STEPS}\nglobal_batch = 4\nmicro_batch = {micro_batch}
        [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0"
    );
    let layers = ConfigLayers::new().with_text("own_family", &text)?;
    sets.iter()
        .try_fold(layers, |layers, set| layers.with_set(set))
}

fn config(data: &str, layout: &str, sets: &[&str]) -> TrainConfig {
    let layers = layers(data, 1, sets).and_then(|layers| layers.with_layout(layout));
    layers.and_then(ConfigLayers::load).unwrap()
}

#[test]
fn every_layout_trains_as_one_rank_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4_000, fresh_seed());
    let data = path.to_str().unwrap();
    for tied in ["model.tied=true", "model.tied=false"] {
        let one_rank = layers(data, 4, &[tied]).and_then(ConfigLayers::load);
        let expected = train(one_rank.unwrap(), Layout::SINGLE);
        for (layout, set) in [
            ("tp2", "recompute.method=\"uniform\""),
            ("tp2-sp", "model.mtp_layers=0"),
            ("tp4-sp", "recompute.modules=[\"norm\"]"),
            ("pp2", "recompute.method=\"uniform\""),
            ("pp2", "parallel.schedule=\"zb-v\""),
            ("tp2-pp2-sp", "parallel.zero=1"),
            ("dp2", "parallel.zero=3"),
            ("tp2-cp2-dp2-sp", "parallel.zero=1"),
        ] {
            let found = train(config(data, layout, &[tied, set]), layout.parse().unwrap());
            compare(&found, &expected, &format!("{layout}, {tied}"));
        }
    }
}

#[test]
fn multi_token_prediction_uses_the_head_and_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 4_000, fresh_seed());
    let data = path.to_str().unwrap();
    let mtp = "model.mtp_layers=1";
    let one_rank = layers(data, 4, &[mtp]).and_then(ConfigLayers::load);
    let expected = train(one_rank.unwrap(), Layout::SINGLE);
    let found = train(
        config(data, "tp2-pp2-sp", &[mtp]),
        "tp2-pp2-sp".parse().unwrap(),
    );
    compare(&found, &expected, "tp2-pp2-sp");
}

#[test]
fn the_fused_loss_is_refused_by_the_name_of_the_family() {
    let fused = layers("text.txt", 1, &["train.fused_linear_cross_entropy=true"]);
    let error = fused.and_then(ConfigLayers::load).unwrap_err();
    let why = "it must be false, because the model has the output head of the family masked";
    assert!(error.to_string().contains(why), "{error}");
    assert_eq!(error.exit(), Exit::BadInput);
    let options = ModelOptions {
        fused_linear_cross_entropy: true,
        ..ModelOptions::default()
    };
    let built = FAMILY
        .template()
        .init(&Group::single(0), &options, &Device::flex());
    let error = built.unwrap_err().to_string();
    assert!(
        error.contains("set train.fused_linear_cross_entropy = false"),
        "{error}"
    );
}

#[test]
fn it_is_read_from_and_written_to_hugging_face() {
    let config = FAMILY.template();
    let json = config.to_hf();
    assert_eq!(json["architectures"], json!(["MaskedForCausalLM"]));
    assert_eq!(json["model_type"], json!("masked"));
    let back = DecoderConfig::from_hf(&json, "config.json".as_ref()).unwrap();
    assert_eq!(back, config);
    let names = config.hf_params().unwrap();
    let of_head = names
        .iter()
        .filter(|param| param.path.starts_with("output_head."));
    assert_eq!(of_head.count(), 5);
}

#[test]
fn the_schema_of_the_program_has_it() {
    let _ = *FAMILY;
    let schema = megaburn::train::config::json_schema();
    let names = schema["properties"]["model"]["properties"]["family"]["enum"].clone();
    assert!(names.as_array().unwrap().contains(&json!("masked")));
}
