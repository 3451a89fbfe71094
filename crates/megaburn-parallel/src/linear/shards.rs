use super::ParallelLinear;
use crate::{
    parallelize::Layers,
    shards::{PlanBuilder, Sharded},
};

impl Sharded for ParallelLinear {
    fn shards(&self, plan: &mut PlanBuilder) {
        let of_layer = &self.plan;
        let group = of_layer.copied_on.as_ref().unwrap_or(&of_layer.group);
        plan.drawn_from(of_layer.config.path.as_deref());
        plan.of_group(group);
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
