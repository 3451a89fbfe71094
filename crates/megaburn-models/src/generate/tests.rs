use burn::{
    prelude::Int,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use rstest::rstest;

use super::*;
use crate::{
    decoder::{DecoderConfig, ModelGroups, ModelOptions},
    families::Family,
};

fn tiny(family: Family, max_seq_len: usize) -> DecoderConfig {
    let template = family.template();
    let vocab = 37;
    let hidden = 16;
    let ffn = 24;
    let layers = 2;
    let heads = 4;
    let head_dim = 4;
    let kv_heads = template.kv_heads.min(heads);
    let window = (family == Family::MISTRAL).then_some(3);
    DecoderConfig {
        vocab,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        head_dim,
        max_seq_len,
        window,
        ..template
    }
}

fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        eos: vec![],
        sampling: Sampling::GREEDY,
        decoder_start: None,
        seed: 0,
    }
}

fn model(config: &DecoderConfig, seed: u64) -> Decoder {
    config
        .init(
            &Group::single(seed),
            &ModelOptions::default(),
            &Device::flex().autodiff(),
        )
        .unwrap()
}

fn run(model: &Decoder, prompts: &[Vec<u32>], options: &GenerateOptions) -> Vec<Generated> {
    let resume_advice = |_, _| ControlFlow::Continue(());
    generate(model, prompts, options, &Device::flex(), resume_advice).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    vec![vec![5, 1, 30], vec![7], vec![2, 2, 9, 36, 0, 11, 4]]
}

/// The likeliest tokens by full forward passes, without a cache.
fn without_cache(model: &Decoder, prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..num_tokens {
        let ids: Vec<i64> = tokens.iter().map(|&token| token.into()).collect();
        let ids = TensorData::new(ids, [tokens.len(), 1]);
        let logits = model.full_logits(Tensor::<2, Int>::from_data(ids, &Device::flex()));
        let last = logits
            .narrow(0, tokens.len() - 1, 1)
            .into_data()
            .try_to_vec::<f32>()
            .unwrap();
        tokens.push(Sampling::GREEDY.choose(&last, 0.0));
    }
    tokens.split_off(prompt.len())
}

#[rstest]
fn a_batch_with_a_cache_writes_what_each_prompt_alone_writes_without(
    #[values(
        Family::GPT2,
        Family::LLAMA,
        Family::MISTRAL,
        Family::QWEN2,
        Family::QWEN3
    )]
    family: Family,
) {
    let model = model(&tiny(family, 32), 11);
    let found = run(&model, &prompts(), &greedy(12));
    for (found, prompt) in found.iter().zip(prompts()) {
        assert_eq!(found.tokens, without_cache(&model, &prompt, 12));
        assert_eq!(found.finish, Finish::MaxTokens);
    }
}

/// The embeddings of BERT in a decoder.
#[test]
fn token_types_and_the_norm_of_embeddings_count_in_generation() {
    let config = DecoderConfig {
        token_types: 2,
        embedding_norm: true,
        ..tiny(Family::GPT2, 32)
    };
    let model = model(&config, 11);
    for (found, prompt) in run(&model, &prompts(), &greedy(12)).iter().zip(prompts()) {
        assert_eq!(found.tokens, without_cache(&model, &prompt, 12));
    }
}

#[rstest]
fn every_rank_of_a_group_writes_the_same(#[values(2, 4)] ranks: usize) {
    let config = tiny(Family::QWEN3, 32);
    let sampling = Sampling {
        temperature: 1.5,
        top_k: Some(20),
        top_p: Some(0.9),
    };
    for options in [
        greedy(9),
        GenerateOptions {
            sampling,
            seed: 3,
            ..greedy(9)
        },
    ] {
        let alone = run(&model(&config, 5), &prompts(), &options);
        let group = GroupOptions {
            seed: 5,
            ..Default::default()
        };
        for found in run_threads(ranks, group, |group| {
            let split = ModelOptions {
                sequence_parallel: true,
                ..ModelOptions::default()
            };
            let model = config.init(&group, &split, &Device::flex().autodiff())?;
            Ok::<_, ModelError>(run(&model, &prompts(), &options))
        }) {
            assert_eq!(found.unwrap(), alone);
        }
    }
}

#[rstest]
fn ranks_that_share_prompts_write_the_same(
    #[values(2, 3, 5)] ranks: usize,
    #[values(Family::GPT2, Family::LLAMA, Family::MISTRAL, Family::QWEN3)] family: Family,
) {
    let config = tiny(family, 40);
    // Adds a prompt of which every rank has some tokens, and one that outgrows the model's longest
    // sequence.
    let long = (0..23).map(|at| at * 7 % 37).collect();
    let prompts = [prompts(), vec![long, vec![8; 37]]].concat();
    let alone = run(&model(&config, 5), &prompts, &greedy(9));
    let group = GroupOptions {
        seed: 5,
        ..Default::default()
    };
    for found in run_threads(ranks, group, |cp| {
        let groups = ModelGroups {
            cp,
            ..ModelGroups::from(&Group::single(5))
        };
        let device = Device::flex().autodiff();
        let model = config.init(groups, &ModelOptions::default(), &device)?;
        Ok::<_, ModelError>(run(&model, &prompts, &greedy(9)))
    }) {
        assert_eq!(found.unwrap(), alone);
    }
}

#[test]
fn a_text_ends_where_the_model_or_the_caller_ends_it() {
    let model = model(&tiny(Family::LLAMA, 32), 2);
    let free = run(&model, &prompts(), &greedy(10));
    let eos = free[0].tokens[4];
    let first = free[0]
        .tokens
        .iter()
        .position(|&token| token == eos)
        .unwrap();
    let ended = run(
        &model,
        &prompts(),
        &GenerateOptions {
            eos: vec![eos],
            ..greedy(10)
        },
    );
    assert_eq!(ended[0].tokens, free[0].tokens[..first]);
    assert_eq!(ended[0].finish, Finish::Eos);
    let mut seen = Vec::new();
    let stopped = generate(
        &model,
        &prompts(),
        &greedy(10),
        &Device::flex(),
        |prompt, token| {
            seen.push((prompt, token));
            if prompt == 1 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    );
    let stopped = stopped.unwrap();
    assert_eq!(
        (stopped[1].tokens.len(), stopped[1].finish),
        (1, Finish::Stopped)
    );
    assert_eq!(stopped[2], free[2]);
    assert_eq!(seen.len(), 21);
    assert!(run(&model, &prompts(), &greedy(0))[2].tokens.is_empty());
}

#[rstest]
fn a_text_longer_than_the_model_goes_on_from_its_end(
    #[values(Family::GPT2, Family::LLAMA)] family: Family,
) {
    let model = model(&tiny(family, 8), 4);
    // 20 tokens in total: the first window ends at 8, and every later one starts with 4 tokens.
    let prompt = vec![3, 1, 4, 1, 5];
    let found = run(&model, std::slice::from_ref(&prompt), &greedy(15))
        .remove(0)
        .tokens;
    let mut all = prompt.clone();
    all.extend(without_cache(&model, &all, 4));
    while all.len() < 20 {
        let window = all[all.len() - 4..].to_vec();
        all.extend(without_cache(&model, &window, 5));
    }
    assert_eq!(found, all[5..20]);
    // A prompt that is already too long.
    let long = [prompt.clone(), vec![9; 30]].concat();
    let tail = long[long.len() - 4..].to_vec();
    assert_eq!(
        run(&model, &[long], &greedy(5))[0].tokens,
        without_cache(&model, &tail, 5)
    );
}

#[test]
fn the_seed_decides_a_text_whatever_stands_beside_it() {
    let model = model(&tiny(Family::LLAMA, 64), 6);
    let sampling = Sampling {
        temperature: 1.0,
        top_k: None,
        top_p: None,
    };
    let drawn = |prompts: &[Vec<u32>], seed| {
        run(
            &model,
            prompts,
            &GenerateOptions {
                sampling,
                seed,
                ..greedy(20)
            },
        )
    };
    let all = drawn(&prompts(), 1);
    let again = drawn(&prompts(), 1);
    let other = drawn(&prompts(), 2);
    assert_eq!(all, again);
    assert_ne!(all, other);
    assert_eq!(drawn(&prompts()[..1], 1)[0], all[0]);
    let twins = drawn(&[vec![1], vec![1]], 1);
    assert_ne!(twins[0], twins[1]);
}

#[rstest]
#[case(vec![vec![1], vec![]], "prompt 1 has no token")]
#[case(vec![vec![1, 37]], "prompt 0 has token 37, but the model's vocabulary is 37")]
fn a_prompt_that_cannot_be_is_refused(#[case] prompts: Vec<Vec<u32>>, #[case] message: &str) {
    let model = model(&tiny(Family::LLAMA, 8), 0);
    let resume_advice = |_, _| ControlFlow::Continue(());
    let error = generate(&model, &prompts, &greedy(1), &Device::flex(), resume_advice).unwrap_err();
    assert!(error.to_string().contains(message), "{error}");
}
