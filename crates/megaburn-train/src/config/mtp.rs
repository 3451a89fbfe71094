//! Checks of multi-token prediction.

use super::{TrainConfig, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// Refuses MTP depths at which no token of a sequence has a label, and a number of depths other
    /// than `parallel.pipeline_layout` names.
    ///
    /// # Errors
    /// One of these is the case; the error has both numbers.
    pub(crate) fn check_mtp(&self, mtp_depths: usize) -> Result<(), TrainError> {
        let seq_len = self.data.seq_len;
        let rule = format!("less than data.seq_len {seq_len}: no token has a label further ahead");
        require(
            mtp_depths == 0 || mtp_depths < seq_len,
            "model.mtp_layers",
            mtp_depths,
            rule,
        )?;
        let named = self.parallel.layer_split().mtp_layers()?;
        let rule = format!(
            "{named}, the number of `m` in parallel.pipeline_layout, or the layout must \
                    have no `m`"
        );
        require(
            named == 0 || named == mtp_depths,
            "model.mtp_layers",
            mtp_depths,
            rule,
        )
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::{ConfigLayers, TrainConfig};

    fn with(layout: &str, sets: &[&str]) -> TrainConfig {
        let layers = ["data.seq_len=4"].iter().chain(sets);
        let layers = layers.fold(ConfigLayers::new(), |layers, set| {
            layers.with_set(set).unwrap()
        });
        layers.with_layout(layout).unwrap().load().unwrap()
    }

    #[rstest]
    #[case(0, "")]
    #[case(3, "")]
    #[case(
        4,
        "`model.mtp_layers` is 4: it must be less than data.seq_len 4: no token"
    )]
    fn depths_are_within_a_sequence(#[case] mtp_depths: usize, #[case] message: &str) {
        let found = with("tp1", &[&format!("model.mtp_layers={mtp_depths}")]).layout(None);
        match message {
            "" => drop(found.unwrap()),
            message => assert!(found.unwrap_err().to_string().contains(message)),
        }
    }

    #[rstest]
    #[case("Ett|ttmL", 1, "")]
    #[case("Ett|ttm*2L", 2, "")]
    #[case("Ett|ttL", 2, "")]
    #[case(
        "Ett|ttmL",
        2,
        "`model.mtp_layers` is 2: it must be 1, the number of `m` in parallel"
    )]
    #[case("Ett|ttmL", 0, "`model.mtp_layers` is 0: it must be 1")]
    #[case(
        "Ettm|ttL",
        1,
        "stage 0 has an MTP depth (m), which only the last stage"
    )]
    fn a_pipeline_names_all_of_them_or_none(
        #[case] text: &str,
        #[case] mtp_depths: usize,
        #[case] message: &str,
    ) {
        let sets = [
            format!("parallel.pipeline_layout={text}"),
            format!("model.mtp_layers={mtp_depths}"),
        ];
        let found = with("pp2", &[&sets[0], &sets[1]]).layout(None);
        match message {
            "" => drop(found.unwrap()),
            message => assert!(found.unwrap_err().to_string().contains(message)),
        }
    }

    #[test]
    fn a_scaling_factor_that_learns_nothing_is_refused() {
        let layers = ConfigLayers::new()
            .with_set("train.mtp_loss_scaling_factor=0")
            .unwrap();
        let error = layers.load().unwrap_err().to_string();
        assert!(error.contains("`train.mtp_loss_scaling_factor` is 0: it must be more than 0"));
    }
}
