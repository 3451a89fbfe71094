//! Settings that cannot be right on shards.

use burn::{
    grad_clipping::GradientClippingConfig,
    optim::{AdamWConfig, LambConfig},
};
use burn_train::SupervisedTraining;
use megaburn_collective::ProcessGroups;

use super::program::{Net, Program, loader, loader_of, optimizer, schedule};
use crate::{LearnerError, ParallelTraining};

/// The message of the error that `launch` ends with on every rank.
fn refused(
    layout: &str,
    launch: impl Fn(&Program<'_>, &ProcessGroups) -> Result<(), LearnerError> + Sync,
) -> String {
    let dir = tempfile::tempdir().unwrap();
    let ranks = Program::new(dir.path()).run(layout, launch);
    let errors: Vec<String> = ranks
        .into_iter()
        .map(|rank| rank.unwrap_err().to_string())
        .collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

fn launch(
    program: &Program<'_>,
    groups: &ProcessGroups,
    parallel: ParallelTraining,
) -> Result<(), LearnerError> {
    let net = Net::known(&groups.tp);
    parallel.launch(program.training(), net, optimizer(), schedule())?;
    Ok(())
}

#[test]
fn what_cannot_be_right_on_shards_is_refused_with_what_to_do() {
    let axis = refused("tp2-pp2", |program, groups| {
        launch(program, groups, ParallelTraining::new(groups))
    });
    assert!(
        axis.contains("pp is 2") && axis.contains("megaburn::train"),
        "{axis}"
    );

    let lamb = refused("tp2", |program, groups| {
        let (net, parallel) = (Net::known(&groups.tp), ParallelTraining::new(groups));
        let optimizer = LambConfig::new().init();
        parallel.launch(program.training(), net, optimizer, schedule())?;
        Ok(())
    });
    assert!(lamb.contains("ShardedOptimizer"), "{lamb}");

    for norm in [0.0, -1.0, f64::NAN] {
        let norm = refused("dp1", |program, groups| {
            let parallel = ParallelTraining::new(groups).with_max_grad_norm(norm);
            launch(program, groups, parallel)
        });
        assert!(
            norm.contains("max_grad_norm") && norm.contains("positive"),
            "{norm}"
        );
    }

    let checkpointers = refused("tp2", |program, groups| {
        let training = program.training().with_default_checkpointers();
        let (net, parallel) = (Net::known(&groups.tp), ParallelTraining::new(groups));
        parallel.launch(training, net, optimizer(), schedule())?;
        Ok(())
    });
    assert!(
        checkpointers.contains("with_checkpoints"),
        "{checkpointers}"
    );

    let resume = refused("dp2", |program, groups| {
        let program = Program {
            resume: Some(3),
            ..program.clone()
        };
        launch(&program, groups, ParallelTraining::new(groups))
    });
    assert!(resume.contains("checkpoint(3)"), "{resume}");

    let few = refused("dp2", |program, groups| {
        let training = SupervisedTraining::new(program.dir, loader(8), loader(1))
            .with_application_logger(None);
        let (net, parallel) = (Net::known(&groups.tp), ParallelTraining::new(groups));
        parallel.launch(training, net, optimizer(), schedule())?;
        Ok(())
    });
    assert!(
        few.contains("validation") && few.contains("1 items"),
        "{few}"
    );
}

#[test]
fn clipping_of_unsplit_parameters_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        epochs: 1,
        ..Program::new(dir.path())
    };
    let ranks = program.run("dp2", |program, groups| {
        let clipping = Some(GradientClippingConfig::Norm(1.0));
        let optimizer = AdamWConfig::new().with_grad_clipping(clipping).init();
        let (net, parallel) = (Net::known(&groups.tp), ParallelTraining::new(groups));
        parallel.launch(program.training(), net, optimizer, schedule())?;
        Ok(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
}

#[test]
fn a_folder_of_another_run_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program {
        epochs: 1,
        saves: true,
        ..Program::new(dir.path())
    };
    program.probes("dp2");
    let ranks = program.run("dp2", |program, groups| {
        launch(program, groups, program.parallel(groups))
    });
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(error.contains("checkpoint(1)"), "{error}");
    }
    // A missing epoch is an error that names it, not a start from the beginning.
    let missing = Program {
        resume: Some(7),
        ..program
    };
    let ranks = missing.run("dp2", |program, groups| {
        launch(program, groups, program.parallel(groups))
    });
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(error.contains("step-00000007"), "{error}");
    }
}

#[test]
fn ranks_that_split_matrices_must_read_the_same_batches() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(dir.path());
    let ranks = program.run("tp2", |program, groups| {
        let items = if groups.tp.rank() == 0 { 8 } else { 7 };
        let training = SupervisedTraining::new(program.dir, loader(items), loader(8))
            .with_application_logger(None);
        let (net, parallel) = (Net::known(&groups.tp), ParallelTraining::new(groups));
        parallel.launch(training, net, optimizer(), schedule())?;
        Ok(())
    });
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(error.contains("step 2: ranks 0 and 1"), "{error}");
    }
}

#[test]
fn ranks_that_split_matrices_must_read_the_same_items() {
    let dir = tempfile::tempdir().unwrap();
    let program = Program::new(dir.path());
    let ranks = program.run("tp2", |program, groups| {
        // As with loaders that shuffle with seeds of their own.
        let first = 8 * groups.tp.rank() as u32;
        let training = SupervisedTraining::new(program.dir, loader_of(first..first + 8), loader(8))
            .with_application_logger(None);
        let (net, parallel) = (Net::known(&groups.tp), ParallelTraining::new(groups));
        parallel.launch(training, net, optimizer(), schedule())?;
        Ok(())
    });
    for rank in ranks {
        let error = rank.unwrap_err().to_string();
        assert!(
            error.contains("ranks 0 and 1") && error.contains("same seed"),
            "{error}"
        );
    }
}
