//! The default folder of a run.

use std::path::Path;

use megaburn_report::console::human_number;

use super::TrainConfig;

impl TrainConfig {
    /// `runs/MODEL-DATA`: a folder named after the model and the data, so that trainings of
    /// different models or texts do not become one run by accident. MODEL is the name of
    /// `model.init`, or the family and the number of parameters; DATA is the name of the file.
    pub(super) fn default_dir(&self) -> String {
        let model = match &self.model.init {
            Some(init) => name_of(Path::new(init)),
            None => format!("{}{}", self.model.family, self.size()),
        };
        let stem = |path: &str| {
            let stem = Path::new(path).file_stem();
            stem.map_or_else(|| "data".into(), |stem| stem.to_string_lossy().into_owned())
        };
        let data = match (&self.data.path, self.data.train.as_slice()) {
            (Some(path), _) => stem(path),
            (None, []) => "burn-sources".to_string(),
            (None, [only]) => stem(&only.path),
            (None, [first, others @ ..]) => format!("{}-and-{}", stem(&first.path), others.len()),
        };
        format!("runs/{}-{}", plain(&model), plain(&data))
    }

    /// A hyphen and the number of parameters. Empty if the vocabulary is unknown, because the
    /// tokenizer cannot be opened; the run fails for that reason later.
    fn size(&self) -> String {
        let of_tokenizer = || Some(self.data.tokenizer.open().ok()?.vocab_size());
        let vocab = self.model.vocab.or_else(of_tokenizer);
        let plan = vocab.and_then(|vocab| {
            self.model
                .decoder(self.data.longest_seq_len(), vocab)
                .whole_plan()
                .ok()
        });
        plan.map_or_else(String::new, |plan| {
            format!("-{}", human_number(plan.num_global() as f64))
        })
    }
}

/// The last component of a path; for a checkpoint inside a run, the name of the run.
fn name_of(path: &Path) -> String {
    let folder = path
        .parent()
        .filter(|folder| folder.ends_with("checkpoints"));
    let path = folder.and_then(Path::parent).unwrap_or(path);
    // Paths such as `.` have a name only after they are resolved.
    let resolved = path.canonicalize();
    let name = path
        .file_name()
        .or_else(|| resolved.as_ref().ok()?.file_name());
    name.map_or_else(
        || "model".into(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// Replaces all characters that a shell or a file system might interpret.
fn plain(name: &str) -> String {
    let keeps = |c: char| c.is_alphanumeric() || "._-".contains(c);
    let name: String = name
        .chars()
        .map(|c| if keeps(c) { c } else { '-' })
        .collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() {
        "unnamed".to_string()
    } else {
        name.to_string()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::{ConfigLayers, RunConfig};

    fn dir(sets: &[&str]) -> String {
        let layers = sets
            .iter()
            .try_fold(ConfigLayers::new(), |layers, set| layers.with_set(set));
        layers.unwrap().load().unwrap().run.dir
    }

    #[rstest]
    #[case(&[], "runs/llama-821k-burn-sources")]
    #[case(&["data.path=texts/shake speare.txt"], "runs/llama-821k-shake-speare")]
    #[case(&["data.path=c4.en.jsonl", "model.vocab=4096"], "runs/llama-1.31M-c4.en")]
    #[case(&["model.family=mixtral"], "runs/mixtral-4.95M-burn-sources")]
    #[case(&["run.dir=runs/mine", "model.layers=8"], "runs/mine")]
    #[case(&["data.tokenizer=no/such.json"], "runs/llama-burn-sources")]
    fn a_folder_is_named_after_model_and_data(#[case] sets: &[&str], #[case] expected: &str) {
        assert_eq!(dir(sets), expected);
    }

    #[test]
    fn the_default_is_that_of_the_default_run() {
        assert_eq!(RunConfig::default().dir, dir(&[]));
    }
}
