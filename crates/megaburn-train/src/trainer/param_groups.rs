use std::collections::BTreeSet;

use megaburn_collective::objects;

use crate::{error::TrainError, trainer::Trainer};

impl Trainer {
    /// Refuses a group of `optimizer.groups` that no parameter belongs to, which would silently have
    /// no effect.
    ///
    /// # Errors
    /// The first such group.
    /// # Collective
    /// All ranks; the numbers of the groups, if there are any.
    pub(crate) fn check_groups(&self) -> Result<(), TrainError> {
        let groups = &self.config.optimizer.groups;
        if groups.is_empty() {
            return Ok(());
        }
        let first = |path: &str| groups.iter().position(|group| group.matches(path));
        let mine: BTreeSet<usize> = self
            .plan
            .iter()
            .filter_map(|(path, _)| first(path))
            .collect();
        let all: Vec<BTreeSet<usize>> = objects::gather(self.world(), &mine)?;
        let used: BTreeSet<usize> = all.into_iter().flatten().collect();
        let used: BTreeSet<usize> = objects::broadcast(self.world(), &used)?;
        match (0..groups.len()).find(|number| !used.contains(number)) {
            None => Ok(()),
            Some(number) => Err(TrainError::Invalid {
                key: "optimizer.groups",
                value: format!("a list with match {:?}", groups[number].pattern),
                rule:
                    "a list of groups that each match a parameter which no earlier group matches; \
                    `megaburn checkpoint ls` lists the parameters of a checkpoint"
                        .into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::trainer::testing::trainers;

    #[rstest]
    // A parameter of one stage of a pipeline counts.
    #[case("[{match=\"norm.*\",lr=1e-3},{match=\"blocks.0.*\",lr=1e-3}]", None)]
    #[case("[{match=\"block.*\",lr=1e-3}]", Some("block.*"))]
    #[case("[{match=\"*\",lr=1e-3},{match=\"norm.*\",lr=1e-4}]", Some("norm.*"))]
    fn a_group_without_parameters_is_refused(
        #[case] groups: &str,
        #[case] refused: Option<&str>,
        #[values("tp2", "pp2")] layout: &str,
    ) {
        let set = format!("optimizer.groups={groups}");
        let checked = trainers(&[&set], layout, |trainer| Ok(trainer.check_groups()));
        for found in checked {
            let error = found.err().map(|error| error.to_string());
            assert_eq!(error.is_some(), refused.is_some(), "{error:?}");
            if let (Some(error), Some(pattern)) = (error, refused) {
                assert!(error.contains(&format!("{pattern:?}")), "{error}");
            }
        }
    }
}
