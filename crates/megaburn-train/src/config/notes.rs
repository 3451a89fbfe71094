//! Notes on configurations that are valid but may not be what was meant.

use megaburn_models::DecoderConfig;

use super::TrainConfig;

impl TrainConfig {
    /// Sentences to print when a run of `model` starts.
    pub(crate) fn notes(&self, model: &DecoderConfig) -> Vec<String> {
        let mut notes = Vec::new();
        if let Ok(batches) = self.train.batch_schedule() {
            let steps = self.train.steps;
            let schedule = self.optimizer.lr_schedule(steps, &batches);
            let end = batches.samples_after(steps);
            if schedule.warmup_samples > end {
                notes.push(format!(
                    "the warm-up of {} samples is longer than the run of {end}: the learning rate ends at {:.2e} and never reaches optimizer.lr; set a smaller optimizer.warmup_steps",
                    schedule.warmup_samples,
                    schedule.lr(end),
                ));
            }
        }
        if let Some(experts) = &model.experts
            && experts.top_k == 1
            && experts.normalise
        {
            notes.push(
                "model.experts.top_k is 1 and the weights of a token's experts are normalised: \
                each weight is 1, so the loss does not train the router; choose top_k 2 or more, \
                or model.experts.normalise = false if the family allows it"
                    .into(),
            );
        }
        if let Err(error) = model.check_sayable() {
            notes.push(format!(
                "the model cannot be exported to Hugging Face: {error}"
            ));
        }
        if !self.data.evaluates() {
            let key = match &self.data.split {
                Some(split) => format!("data.split is {split}"),
                None => "data.validation_fraction is 0".into(),
            };
            notes.push(format!("{key}: there are no evaluations"));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case(&[], "")]
    #[case(&["train.steps=20"], "")]
    #[case(
        &["train.steps=10"],
        "the warm-up of 160 samples is longer than the run of 80: the learning rate ends at 1.50e-3 and never"
    )]
    #[case(&["model.family=mixtral", "model.experts.top_k=1"], "model.experts.top_k is 1 and the")]
    #[case(&["model.family=mixtral"], "")]
    #[case(&["model.family=deepseek_v2", "model.experts.top_k=1"], "")]
    #[case(&["data.validation_fraction=0"], "there are no evaluations")]
    #[case(&["data.split=99,0,1"], "data.split is 99,0,1: there are no evaluations")]
    fn what_may_not_be_meant_is_said(#[case] sets: &[&str], #[case] note: &str) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let config = layers.unwrap().load().unwrap();
        let notes = config.notes(&config.model.decoder(128, 260));
        assert_eq!(notes.len(), usize::from(!note.is_empty()), "{notes:?}");
        assert!(notes.iter().all(|found| found.contains(note)), "{notes:?}");
    }
}
