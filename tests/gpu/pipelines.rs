//! Every pipeline schedule trains like one GPU.

use megaburn::{
    collective::Group,
    mesh::Layout,
    pipeline::ScheduleKind,
    train::{
        ConfigLayers, TrainConfig, TrainError,
        config::{RecomputeConfig, RecomputeMethod},
    },
};

use crate::{
    GroupTest,
    layouts::{compare, train},
};
use megaburn_kernel_tests::part;
use megaburn_test_support::{gather::gather, layout_grid::EPSILON, text::write_random_text};

pub(crate) const GROUP_TESTS: &[GroupTest] =
    &[("every_schedule_trains_as_one_gpu_does", schedules)];

const CONFIG: &str = "
[model]
hidden = 64
ffn = 160
layers = 9
heads = 4
kv_heads = 2
[data]
seq_len = 48
[train]
steps = 3
micro_batch = 1
[optimizer]
lr = 1e-3
warmup_steps = 0
";

/// Schedules and numbers of chunks.
const WAYS: [(ScheduleKind, usize); 6] = [
    (ScheduleKind::GPipe, 1),
    (ScheduleKind::GPipe, 2),
    (ScheduleKind::OneForwardOneBackward, 1),
    (ScheduleKind::Interleaved, 2),
    (ScheduleKind::ZbH1, 1),
    (ScheduleKind::ZbV, 2),
];

fn schedules(world: &Group) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("megaburn-pipelines-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join("text.txt");
    write_random_text(&path, 60_000, 4321);
    let data = path.to_str().expect("the folder's name is text");
    let result = run(world, data);
    // Temporary files may stay if they cannot be removed.
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn run(world: &Group, data: &str) -> Result<(), String> {
    let config = |tied: bool, global_batch: usize| -> Result<TrainConfig, TrainError> {
        let mut config = ConfigLayers::new().with_text("pipelines.rs", CONFIG)?;
        // With a large epsilon, rounding errors cannot decide the sign of an update.
        config = config.with_set(&format!("optimizer.eps={EPSILON}"))?;
        config = config
            .with_set(&format!("model.tied={tied}"))?
            .with_data(data)?;
        let mut config = config.load()?;
        config.train.global_batch = global_batch;
        Ok(config)
    };
    let text = |error: TrainError| error.to_string();
    let ranks = world.size();
    let mut layouts = vec![Layout {
        pp: ranks,
        ..Layout::SINGLE
    }];
    if ranks == 4 {
        layouts.push(Layout {
            pp: 2,
            dp: 2,
            ..Layout::SINGLE
        });
        layouts.push(Layout {
            pp: 2,
            tp: 2,
            sp: true,
            ..Layout::SINGLE
        });
    }
    for tied in [true, false] {
        for num_micro_batches in [1, 5] {
            for layout in layouts.iter().filter(|_| part::is_mine()) {
                let global_batch = layout.dp * num_micro_batches;
                let one = Group::single(world.seed());
                let mut alone = config(tied, global_batch).map_err(text)?;
                alone.train.micro_batch = global_batch;
                let (steps, params) = train(alone, &one, Layout::SINGLE).map_err(text)?;
                let expected = (steps, gather(&[params]));
                let again = RecomputeConfig {
                    method: RecomputeMethod::Uniform,
                    offload: true,
                    ..RecomputeConfig::default()
                };
                let mut recomputes = vec![RecomputeConfig::default()];
                recomputes.extend((tied && num_micro_batches > 1).then_some(again));
                let ways = recomputes
                    .iter()
                    .flat_map(|again| WAYS.map(|way| (way, again)));
                for ((schedule, chunks), recompute) in ways {
                    let needs_many = schedule == ScheduleKind::Interleaved;
                    if needs_many && num_micro_batches < layout.pp {
                        continue;
                    }
                    let mut config = config(tied, global_batch).map_err(text)?;
                    config.recompute = recompute.clone();
                    config.parallel.schedule = Some(schedule);
                    config.parallel.chunks = Some(chunks);
                    config.parallel.zero = if layout.dp > 1 { 2 } else { 0 };
                    let named = |why: String| {
                        format!(
                            "{layout}, {schedule} of {chunks} chunks, {num_micro_batches} micro-batches, tied: \
                             {tied}, {recompute:?}: {why}"
                        )
                    };
                    let found = train(config, world, *layout).map_err(text).map_err(named)?;
                    compare(&found, &expected).map_err(named)?;
                }
            }
        }
    }
    Ok(())
}
