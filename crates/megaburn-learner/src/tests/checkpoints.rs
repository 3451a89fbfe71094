//! Trainings that are resumed under the same layout and others.

use std::fs;

use burn::{grad_clipping::GradientClipping, optim::LambConfig};
use megaburn_collective::Group;
use megaburn_optim::ShardedOptimizer;
use rstest::rstest;

use super::program::{Net, Program, close, optimizer, schedule};

/// Checkpoints of two of four epochs.
fn half(layout: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        saves: true,
        ..Program::new(dir.path())
    };
    program.probes(layout);
    dir
}

#[rstest]
#[case("tp2-dp2", "tp2-dp2")]
#[case("tp2-dp2", "dp2")]
#[case("dp2", "tp4-dp2")]
#[case("dp1", "tp2")]
fn a_resumed_training_continues_as_if_it_had_not_stopped(
    #[case] first: &str,
    #[case] second: &str,
) {
    let dir = half(first);
    let names: Vec<_> = fs::read_dir(dir.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");

    let program = Program {
        epochs: 4,
        ..Program::new(dir.path())
    };
    let expected = program.probes(second);
    let resumed = Program {
        resume: Some(2),
        saves: true,
        ..program.clone()
    };
    let found = resumed.probes(second);
    close(&found[0], &expected[0], second);
    let two = Program {
        epochs: 2,
        ..program
    };
    assert_ne!(two.probes(second), found, "the epochs after do not show");
}

#[test]
fn old_checkpoints_are_deleted_and_other_folders_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("checkpoints");
    fs::create_dir_all(folder.join("step-notes")).unwrap();
    let program = Program {
        epochs: 5,
        saves: true,
        ..Program::new(dir.path())
    };
    program.probes("dp2");
    let is_there = |name: &str| folder.join(name).exists();
    assert!(is_there("step-00000005") && is_there("step-00000004"));
    assert!(is_there("step-notes"));
    assert!(
        !is_there("step-00000001"),
        "it is neither new nor the best, because the loss falls"
    );
}

/// The errors of a resume.
fn refused(program: &Program<'_>, net: impl Fn(&Group) -> Net + Sync) -> Vec<String> {
    let ranks = program.run("tp2", |program, groups| {
        let training = program.training();
        let net = net(&groups.tp);
        program
            .parallel(groups)
            .launch(training, net, optimizer(), schedule())?;
        Ok(())
    });
    let errors = ranks.into_iter().map(|rank| rank.unwrap_err().to_string());
    errors.collect()
}

#[test]
fn checkpoints_that_are_damaged_or_of_another_model_are_refused() {
    let dir = half("tp2");
    let program = Program {
        epochs: 4,
        resume: Some(2),
        saves: true,
        ..Program::new(dir.path())
    };
    // `known` has no second bias, which `new` has.
    let missing = refused(&program, Net::new);
    assert!(
        missing.iter().all(|error| error.contains("unused.bias")),
        "{missing:?}"
    );
    let folder = dir.path().join("checkpoints");
    let file = folder.join("step-00000002/rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let damaged = refused(&program, Net::known);
    assert!(
        damaged.iter().any(|error| error.contains("rank-00001")),
        "{damaged:?}"
    );

    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        epochs: 1,
        saves: true,
        ..Program::new(dir.path())
    };
    let ranks = program.run("tp2", |program, groups| {
        let (training, net) = (program.training(), Net::new(&groups.tp));
        program
            .parallel(groups)
            .launch(training, net, optimizer(), schedule())?;
        Ok(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
    let resumed = Program {
        resume: Some(1),
        ..program
    };
    let other = refused(&resumed, Net::known);
    assert!(
        other.iter().all(|error| error.contains("another model")),
        "{other:?}"
    );
}

#[rstest]
#[case("dp2", "tp2-dp2")]
#[case("tp2-dp2", "dp2")]
fn the_state_of_an_optimizer_that_reads_full_parameters_is_resumed(
    #[case] first: &str,
    #[case] second: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        saves: true,
        ..Program::new(dir.path())
    };
    let probes = |program: &Program<'_>, layout| {
        let ranks = program.run(layout, |program, groups| {
            let clipping = GradientClipping::Norm(0.05);
            let optimizer = ShardedOptimizer::new(LambConfig::new().build());
            let (training, net) = (program.training(), Net::known(&groups.tp));
            let result = program.parallel(groups).launch(
                training,
                net,
                optimizer.with_grad_clipping(clipping),
                schedule(),
            )?;
            Ok(result.model.probe())
        });
        let ranks: Vec<Vec<f32>> = ranks.into_iter().map(|rank| rank.unwrap()).collect();
        ranks
    };
    probes(&program, first);
    let whole = Program {
        epochs: 4,
        saves: false,
        ..program.clone()
    };
    let resumed = Program {
        epochs: 4,
        resume: Some(2),
        ..program
    };
    let expected = probes(&whole, second);
    close(&probes(&resumed, second)[0], &expected[0], second);
}
