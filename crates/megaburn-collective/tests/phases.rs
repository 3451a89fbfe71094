//! A rank in a long phase is not treated as hung, and a rank without progress is reported together
//! with its phase.

mod fixture;

use std::{
    thread,
    time::{Duration, Instant},
};

use fixture::{Over, bounded, impatient, world};
use megaburn_collective::{CollectiveError, Group, GroupOptions, Phase, PhaseLimits};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);
/// The timeout of collectives, in seconds.
const TIMEOUT: f64 = 0.4;

fn options(save: f64) -> GroupOptions {
    let phases = PhaseLimits {
        save: Duration::from_secs_f64(save),
        ..PhaseLimits::default()
    };
    GroupOptions {
        phases,
        ..impatient(TIMEOUT)
    }
}

/// Rank 0 saves for four times the timeout of collectives; rank 1 waits for rank 0, and rank 2 for
/// rank 1.
fn save(group: &Group, progress: bool) -> Result<(), CollectiveError> {
    group.barrier()?;
    if group.rank() > 0 {
        group.recv(group.rank() - 1, None, burn::tensor::DType::U8)?;
    } else {
        let phase = group.phase(Phase::Save);
        for _ in 0..16 {
            thread::sleep(Duration::from_secs_f64(TIMEOUT / 4.0));
            phase
                .progress()
                .add(if progress { 5_000_000_000 } else { 0 });
        }
    }
    if group.rank() + 1 < group.size() {
        let data = burn::tensor::TensorData::from([1u8]);
        group.send(data, group.rank() + 1)?;
    }
    group.barrier()
}

#[rstest]
fn who_waits_for_a_rank_that_saves_goes_on_waiting(
    #[values(Over::Threads, Over::Tcp)] over: Over,
    #[values(3)] size: usize,
) {
    let ends = bounded(LIMIT, move || {
        world(over, size, options(30.0), |group| save(&group, true))
    });
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
}

#[rstest]
fn a_save_without_progress_is_given_up_and_named(#[values(Over::Threads, Over::Tcp)] over: Over) {
    let begin = Instant::now();
    let ends = bounded(LIMIT, move || {
        world(over, 3, options(2.0 * TIMEOUT), |group| {
            group.barrier()?;
            if group.rank() > 0 {
                return Ok::<_, CollectiveError>(group.barrier().unwrap_err().to_string());
            }
            let phase = group.phase(Phase::Save);
            phase.progress().expect(96_000_000_000);
            phase.progress().add(41_000_000_000);
            thread::sleep(Duration::from_secs_f64(6.0 * TIMEOUT));
            drop(phase);
            Ok(group.barrier().unwrap_err().to_string())
        })
    });
    for (rank, end) in ends.iter().enumerate() {
        let text = end.as_ref().unwrap();
        let named = text.contains("rank 0 is in `save`: 41.0 of 96.0 GB, no progress for 1 s");
        assert!(
            named && text.contains("train.save_timeout_seconds"),
            "rank {rank}: {text}"
        );
    }
    assert!(begin.elapsed() < Duration::from_secs(10));
}

/// Outside of a phase the limit of collectives applies, however long the rank was in a phase
/// before.
#[rstest]
fn a_rank_that_hangs_after_its_save_is_noticed(#[values(Over::Threads, Over::Tcp)] over: Over) {
    let ends = bounded(LIMIT, move || {
        world(over, 2, options(30.0), |group| {
            group.barrier()?;
            if group.rank() == 0 {
                drop(group.phase(Phase::Save));
                thread::sleep(Duration::from_secs_f64(8.0 * TIMEOUT));
            }
            let begin = Instant::now();
            let error = group.barrier().unwrap_err().to_string();
            Ok::<_, CollectiveError>((error, begin.elapsed()))
        })
    });
    let (text, took) = ends[1].as_ref().unwrap();
    assert!(
        text.contains("timed out after 0.4 s waiting for rank 0"),
        "{text}"
    );
    assert!(took.as_secs_f64() < 6.0 * TIMEOUT, "{took:?}");
}
