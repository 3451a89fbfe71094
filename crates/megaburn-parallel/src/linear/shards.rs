use megaburn_collective::Group;
use megaburn_mesh::Axis;

use super::{ParallelLinear, Split};
use crate::{
    parallelize::Layers,
    shards::{PlanBuilder, Sharded},
};

impl ParallelLinear {
    /// The ranks that split the layer, or hold copies of it.
    pub(super) fn holders(&self) -> &Group {
        self.plan.copied_on.as_ref().unwrap_or(&self.plan.group)
    }

    /// Whether ranks have different features of the output.
    pub(crate) fn has_split_output(&self) -> bool {
        let config = &self.plan.config;
        let is_column = config.split == Split::Column && !config.gather_output;
        is_column && self.plan.group.size() > 1
    }
}

impl Sharded for ParallelLinear {
    fn shards(&self, plan: &mut PlanBuilder) {
        let of_layer = &self.plan;
        let group = self.holders();
        plan.drawn_from(of_layer.config.path.as_deref());
        // The ranks that split an expert may be others than those that split the module.
        if of_layer.config.axis == Axis::Tp {
            plan.of_group(group);
        }
        plan.matrix("weight", &of_layer.weight_spec, self.main_grad());
        plan.adapter("weight", &self.weight, group);
        if let Some(spec) = &of_layer.bias_spec {
            plan.vector("bias", spec, self.bias_grad());
        }
        plan.quantized(of_layer.quantized.as_ref());
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.split(self);
    }
}
