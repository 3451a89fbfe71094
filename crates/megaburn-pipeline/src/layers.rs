use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{error::PipelineError, layout_text, stages::Stages};

/// The part of a model that one stage computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLayers {
    /// Whether the stage begins with the token embedding.
    pub embedding: bool,
    /// The stage's layers, numbered from 0 within the model.
    pub layers: Range<usize>,
    /// Whether the stage ends with the loss.
    pub loss: bool,
}

impl StageLayers {
    /// A single stage with all `num_layers` layers of a model.
    pub fn whole(num_layers: usize) -> Self {
        Self {
            embedding: true,
            layers: 0..num_layers,
            loss: true,
        }
    }
}

/// How the layers of a model are split over the stages of a pipeline. By default as evenly as
/// possible.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerSplit {
    /// The contents of each stage, in Megatron-LM's notation (`--pipeline-model-parallel-layout`).
    /// No other field may be set together with it. For example: `Et|(tt|)*3L`.
    ///
    /// - `E` is the embedding, `t` a layer and `L` the loss.
    /// - `m` is a multi-token prediction block after the layers. These blocks are in the last
    ///   stage, whether they are named or not.
    /// - `|` separates stages; `x*n` and `(..)*n` are repetitions; commas are ignored.
    pub layout: Option<String>,
    /// Layers of the first stage (`--decoder-first-pipeline-num-layers`).
    pub first: Option<usize>,
    /// Layers of the last stage (`--decoder-last-pipeline-num-layers`).
    pub last: Option<usize>,
    /// Whether the embedding counts as a layer (`--account-for-embedding-in-pipeline-split`).
    pub count_embedding: bool,
    /// Whether the loss counts as a layer (`--account-for-loss-in-pipeline-split`).
    pub count_loss: bool,
}

impl LayerSplit {
    /// The stages of a model with `num_layers` layers. If the layers do not divide evenly, stages
    /// after the first get one more layer each.
    ///
    /// # Errors
    /// The split leaves a stage empty, has another number of layers than the model, or is given
    /// both by `layout` and by other fields.
    pub fn stages(
        &self,
        num_layers: usize,
        num_stages: usize,
    ) -> Result<Vec<StageLayers>, PipelineError> {
        let counts = match &self.layout {
            Some(_)
                if Self {
                    layout: None,
                    ..self.clone()
                } != Self::default() =>
            {
                return Err(PipelineError::TwoSplits);
            }
            Some(text) => layout_text::layers(text, num_layers, Some(num_stages))?,
            None => self.counts(num_layers, num_stages)?,
        };
        let mut start = 0;
        let last = num_stages - 1;
        let stages = counts.into_iter().enumerate().map(|(stage, count)| {
            let layers = start..start + count;
            start = layers.end;
            StageLayers {
                embedding: stage == 0,
                layers,
                loss: stage == last,
            }
        });
        Ok(stages.collect())
    }

    /// Checks that the layout fits a model with `num_layers` layers, for any number of stages.
    ///
    /// # Errors
    /// The layout is invalid or has another number of layers.
    pub fn check_layout(&self, num_layers: usize) -> Result<(), PipelineError> {
        let layers = |text| layout_text::layers(text, num_layers, None).map(drop);
        self.layout.as_deref().map_or(Ok(()), layers)
    }

    /// The number of multi-token prediction blocks that the layout names. If it is 0, they are in
    /// their default place, the last stage.
    ///
    /// # Errors
    /// The layout is invalid.
    pub fn mtp_layers(&self) -> Result<usize, PipelineError> {
        self.layout
            .as_deref()
            .map_or(Ok(0), layout_text::mtp_layers)
    }

    /// The number of layers of each stage.
    fn counts(&self, num_layers: usize, num_stages: usize) -> Result<Vec<usize>, PipelineError> {
        let Self {
            first,
            last,
            count_embedding,
            count_loss,
            ..
        } = *self;
        let few = PipelineError::FewLayers {
            num_layers,
            num_stages,
            first,
            last,
        };
        if num_stages == 1 {
            let given = [first, last]
                .into_iter()
                .flatten()
                .all(|given| given == num_layers);
            return if given {
                Ok(vec![num_layers])
            } else {
                Err(few)
            };
        }
        let extra = [
            count_embedding && first.is_none(),
            count_loss && last.is_none(),
        ];
        let extra = extra.map(usize::from);
        // The stages whose number of layers is not given.
        let inner = usize::from(first.is_some())..num_stages - usize::from(last.is_some());
        let given = first.unwrap_or(0).saturating_add(last.unwrap_or(0));
        let places = num_layers + extra[0] + extra[1];
        let places = places.checked_sub(given).ok_or_else(|| few.clone())?;
        if inner.is_empty() && places > 0 {
            return Err(few);
        }
        let each = places / inner.len().max(1);
        let rest = places % inner.len().max(1);
        let mut counts = vec![0; num_stages];
        for (index, stage) in inner.enumerate() {
            counts[stage] = each + usize::from((1..=rest).contains(&index));
        }
        for (stage, given, extra) in [(0, first, extra[0]), (num_stages - 1, last, extra[1])] {
            counts[stage] = match given {
                Some(given) => given,
                None => counts[stage]
                    .checked_sub(extra)
                    .ok_or_else(|| few.clone())?,
            };
        }
        // The first (last) stage may have zero layers only if the embedding (loss) counts as one,
        // or if zero was given explicitly.
        let is_bare = |(stage, count): (usize, &usize)| {
            let is_first = stage == 0 && (count_embedding || first == Some(0));
            let is_last = stage + 1 == num_stages && (count_loss || last == Some(0));
            *count == 0 && !is_first && !is_last
        };
        if counts.iter().enumerate().any(is_bare) {
            Err(few)
        } else {
            Ok(counts)
        }
    }
}

impl Stages {
    /// The part of the model that each chunk of a rank has, given the parts of all stages.
    pub fn chunks_of(self, rank: usize, stages: &[StageLayers]) -> Vec<StageLayers> {
        (0..self.num_chunks)
            .map(|chunk| stages[self.stage(rank, chunk)].clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::stages::Placement;

    fn split(
        split: LayerSplit,
        num_layers: usize,
        num_stages: usize,
    ) -> Result<Vec<usize>, String> {
        let stages = split
            .stages(num_layers, num_stages)
            .map_err(|error| error.to_string())?;
        assert!(stages.iter().enumerate().all(|(stage, of)| {
            of.embedding == (stage == 0) && of.loss == (stage + 1 == num_stages)
        }));
        let ends = stages
            .windows(2)
            .all(|two| two[0].layers.end == two[1].layers.start);
        assert!(ends && stages[0].layers.start == 0);
        assert_eq!(stages[num_stages - 1].layers.end, num_layers);
        Ok(stages.into_iter().map(|stage| stage.layers.len()).collect())
    }

    fn counted(count_embedding: bool, count_loss: bool) -> LayerSplit {
        LayerSplit {
            count_embedding,
            count_loss,
            ..LayerSplit::default()
        }
    }

    fn given(first: Option<usize>, last: Option<usize>) -> LayerSplit {
        LayerSplit {
            first,
            last,
            ..LayerSplit::default()
        }
    }

    #[rstest]
    #[case(LayerSplit::default(), 8, 1, &[8])]
    #[case(LayerSplit::default(), 8, 4, &[2, 2, 2, 2])]
    #[case(LayerSplit::default(), 7, 4, &[1, 2, 2, 2])]
    #[case(LayerSplit::default(), 5, 4, &[1, 2, 1, 1])]
    #[case(LayerSplit::default(), 5, 2, &[2, 3])]
    #[case(counted(true, true), 6, 4, &[1, 2, 2, 1])]
    #[case(counted(true, true), 30, 8, &[3, 4, 4, 4, 4, 4, 4, 3])]
    #[case(counted(true, false), 7, 2, &[3, 4])]
    #[case(counted(false, true), 7, 2, &[4, 3])]
    #[case(counted(true, true), 2, 4, &[0, 1, 1, 0])]
    #[case(given(Some(1), None), 7, 4, &[1, 2, 2, 2])]
    #[case(given(None, Some(1)), 7, 3, &[3, 3, 1])]
    #[case(given(Some(3), Some(1)), 8, 4, &[3, 2, 2, 1])]
    #[case(given(Some(3), Some(5)), 8, 2, &[3, 5])]
    #[case(given(Some(0), Some(0)), 4, 4, &[0, 2, 2, 0])]
    #[case(LayerSplit { first: Some(1), ..counted(true, true) }, 6, 3, &[1, 3, 2])]
    fn layers_are_split_as_asked_for(
        #[case] of: LayerSplit,
        #[case] num_layers: usize,
        #[case] num_stages: usize,
        #[case] expected: &[usize],
    ) {
        assert_eq!(split(of, num_layers, num_stages).unwrap(), expected);
    }

    #[rstest]
    #[case(LayerSplit::default(), 3, 4)]
    #[case(counted(true, true), 1, 4)]
    #[case(given(Some(8), None), 7, 2)]
    #[case(given(Some(7), None), 7, 2)]
    #[case(given(Some(2), Some(2)), 8, 2)]
    #[case(given(Some(2), None), 8, 1)]
    #[case(given(Some(usize::MAX), Some(usize::MAX)), 8, 4)]
    fn a_stage_without_anything_is_refused(
        #[case] of: LayerSplit,
        #[case] num_layers: usize,
        #[case] num_stages: usize,
    ) {
        let error = split(of, num_layers, num_stages).unwrap_err();
        let numbers = format!("{num_layers} layers cannot fill {num_stages} pipeline stages");
        assert!(error.contains(&numbers), "{error}");
    }

    #[test]
    fn a_layout_is_looked_at_without_a_number_of_stages() {
        let check = |text: &str, num_layers| {
            let split = LayerSplit {
                layout: Some(text.into()),
                ..LayerSplit::default()
            };
            split
                .check_layout(num_layers)
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            [check("Ett|ttL", 4), check("E|tt|t|tL", 4), check("EtL", 1)],
            [const { Ok(()) }; 3]
        );
        assert!(check("Ett|tL", 4).unwrap_err().contains("it has 3 layers"));
        assert!(check("Et|xL", 1).unwrap_err().contains("`x` at 3"));
        assert!(LayerSplit::default().check_layout(4).is_ok());
    }

    #[test]
    fn a_split_is_asked_for_in_one_way() {
        let layout = Some("Ett|ttL".to_string());
        let both = LayerSplit {
            layout: layout.clone(),
            ..counted(true, false)
        };
        assert!(split(both, 4, 2).unwrap_err().contains("pipeline layout"));
        let one = LayerSplit {
            layout,
            ..LayerSplit::default()
        };
        assert_eq!(split(one, 4, 2).unwrap(), [2, 2]);
    }

    #[test]
    fn chunks_are_the_stages_of_their_rank() {
        let all = LayerSplit::default().stages(8, 4).unwrap();
        let stages = Stages {
            num_ranks: 2,
            num_chunks: 2,
            placement: Placement::Vee,
        };
        let layers = |rank| {
            stages
                .chunks_of(rank, &all)
                .into_iter()
                .map(|stage| stage.layers)
        };
        assert!(layers(0).eq([0..2, 6..8]) && layers(1).eq([2..4, 4..6]));
    }
}
