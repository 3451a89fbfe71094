//! The parameters of the ranks of a pipeline.

use megaburn_train::estimate::RankParams;

/// The parameters of the rank of each stage, of which many are alike.
#[derive(Clone, Debug)]
pub(crate) struct StageParams {
    of_stages: Vec<RankParams>,
    /// For each stage, the first one whose rank has the same parameters.
    first: Vec<usize>,
}

impl StageParams {
    pub(crate) fn new(of_stages: Vec<RankParams>) -> Self {
        let first = |params: &RankParams| of_stages.iter().position(|known| known == params);
        let stages = of_stages.iter().enumerate();
        let first = stages.map(|(stage, params)| first(params).unwrap_or(stage));
        Self {
            first: first.collect(),
            of_stages,
        }
    }

    /// The parameters of the rank of a stage.
    pub(crate) fn of(&self, stage: usize) -> &RankParams {
        &self.of_stages[stage]
    }

    /// What `of` makes of the parameters of the rank of each stage; it is called once for those that
    /// are alike.
    pub(crate) fn map<T: Copy>(&self, of: impl Fn(&RankParams) -> T) -> Vec<T> {
        let mut all = Vec::with_capacity(self.of_stages.len());
        for (stage, first) in self.first.iter().enumerate() {
            let known = all.get(*first).copied();
            all.push(known.unwrap_or_else(|| of(&self.of_stages[stage])));
        }
        all
    }

    /// The stages with different parameters: the first one of each kind.
    pub(crate) fn different(&self) -> impl Iterator<Item = usize> {
        let stages = self.first.iter().enumerate();
        stages.filter_map(|(stage, first)| (stage == *first).then_some(stage))
    }
}
