//! Notes on configurations that are valid but may not be what was meant.

use megaburn_models::DecoderConfig;

use super::TrainConfig;

impl TrainConfig {
    /// Sentences to print when a run of `model` starts. Its tokenizer has `num_sentinels`, if its
    /// samples have masked spans.
    pub(crate) fn notes(&self, model: &DecoderConfig, num_sentinels: Option<usize>) -> Vec<String> {
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
        if let Some(num_sentinels) = num_sentinels {
            notes.extend(self.notes_on_spans(num_sentinels));
        }
        if let Err(error) = model.check_sayable() {
            notes.push(format!(
                "the model cannot be exported to Hugging Face: {error}"
            ));
        }
        notes.extend(self.note_on_late_phases());
        if !self.data.evaluates() {
            let key = match &self.data.split {
                Some(split) => format!("data.split is {split}"),
                None => "data.validation_fraction is 0".into(),
            };
            notes.push(format!("{key}: there are no evaluations"));
        }
        notes
    }

    /// What a sample of T5 may need more of than there is, which would end the run.
    fn notes_on_spans(&self, num_sentinels: usize) -> Vec<String> {
        // Two positions are left for special tokens.
        let seq_len = self.data.seq_len;
        let most = self.data.masking().most_masked(seq_len.saturating_sub(2));
        let (len, needed) = (self.data.decoder_seq_len, 2 * most + 1);
        let spans = format!(
            "a sample of data.seq_len = {seq_len} has up to {most} masked tokens, and if each is a \
            span of its own"
        );
        let short = (len < needed).then(|| {
            format!(
                "{spans}, {needed} tokens for the decoder; one with more than \
                data.decoder_seq_len = {len} ends the run"
            )
        });
        let few = (num_sentinels < most).then(|| {
            format!(
                "{spans}, as many sentinels; one with more than the {num_sentinels} of the tokenizer \
                ends the run"
            )
        });
        short.into_iter().chain(few).collect()
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
    #[case(
        &["train.steps=20", "precision.schedule=[{from_step=20,recipe=\"bf16\"},{from_step=21,recipe=\"mxfp8\"}]"],
        "the run ends after step 20 (train.steps): the phases of precision.schedule from step 21 have no effect"
    )]
    #[case(&["data.split=99,0,1"], "data.split is 99,0,1: there are no evaluations")]
    fn what_may_not_be_meant_is_said(#[case] sets: &[&str], #[case] note: &str) {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let config = layers.unwrap().load().unwrap();
        let notes = config.notes(&config.model.decoder(128, 260), None);
        assert_eq!(notes.len(), usize::from(!note.is_empty()), "{notes:?}");
        assert!(notes.iter().all(|found| found.contains(note)), "{notes:?}");
    }

    #[rstest]
    #[case(&[], 153, 76, None)]
    #[case(&[], 152, 76, Some("up to 76 masked tokens, and if each is a span of its own, 153 tokens for the decoder; one with more than data.decoder_seq_len = 152 ends"))]
    #[case(&[], 153, 75, Some("as many sentinels; one with more than the 75 of the tokenizer ends"))]
    #[case(&["data.masking.probability=0.3"], 305, 152, Some("up to 153 masked tokens, and"))]
    fn a_sample_that_may_not_fit_is_said(
        #[case] sets: &[&str],
        #[case] decoder_seq_len: usize,
        #[case] num_sentinels: usize,
        #[case] note: Option<&str>,
    ) {
        let len = format!("data.decoder_seq_len={decoder_seq_len}");
        let sets = sets.iter().chain(&["model.family=t5", "data.seq_len=512"]);
        let layers = sets
            .chain([&&*len])
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        let config = layers.unwrap().load().unwrap();
        let model = config.model.decoder(512, 260);
        let notes = config.notes(&model, Some(num_sentinels)).concat();
        assert_eq!(notes.is_empty(), note.is_none(), "{notes}");
        assert!(notes.contains(note.unwrap_or_default()), "{notes}");
    }
}
