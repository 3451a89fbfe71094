//! A linear layer of Burn as a parallel one.

use burn::{
    module::{Module, Param},
    nn,
    tensor::Tensor,
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_mesh::{FusedPart, ShardSpec};

use super::{LinearPlan, ParallelLinear, ParallelLinearConfig, Split};
use crate::{
    error::ParallelError,
    parallelize::{Cut, Kind, Rule, SplitLayer, Style, cut},
};

/// The same layer with the same weights, on one rank. [`parallelize`](crate::parallelize) splits it.
/// Adapters of the weights are merged.
impl From<nn::Linear> for ParallelLinear {
    fn from(layer: nn::Linear) -> Self {
        let layer = layer.materialize();
        let [rows, columns] = layer.weight.val().dims();
        let config = ParallelLinearConfig::new(rows, columns).with_bias(layer.bias.is_some());
        let group = Group::single(0);
        let axis = config.axis;
        let weight_spec = ShardSpec::whole(&[rows, columns], axis, 0, 1);
        let bias_spec = layer.bias.as_ref();
        let bias_spec = bias_spec.map(|_| ShardSpec::whole(&[columns], axis, 0, 1));
        Self {
            // Without the mappings of Burn's `LinearLayout::Col`, whose value is transposed already.
            weight: Param::initialized(layer.weight.id, layer.weight.val()),
            bias: layer.bias,
            plan: LinearPlan {
                config,
                group,
                weight_spec,
                bias_spec,
                replicas: Vec::new(),
                main_grad: MainGrad::default(),
                bias_grad: MainGrad::default(),
                quantized: None,
                copied_on: None,
            },
        }
    }
}

impl SplitLayer for ParallelLinear {
    fn kind(&self) -> Kind {
        Kind::Linear
    }

    fn weight(&self) -> &Param<Tensor<2>> {
        &self.weight
    }

    fn group(&self) -> &Group {
        &self.plan.group
    }

    fn split_by(
        &mut self,
        rule: Option<&Rule>,
        path: &str,
        group: &Group,
    ) -> Result<(), ParallelError> {
        let Some(rule) = rule else {
            let plan = &mut self.plan;
            plan.weight_spec = whole(&plan.weight_spec, group);
            plan.bias_spec = plan.bias_spec.as_ref().map(|spec| whole(spec, group));
            plan.copied_on = Some(group.clone());
            return Ok(());
        };
        let config = config_of(&self.plan.config, rule, path, group)?;
        let plan = config.plan(group)?;
        let place = |field| Cut {
            layer: path,
            field,
            group,
        };
        self.weight = cut(&self.weight, &plan.weight_spec, place("weight"));
        if let (Some(bias), Some(spec)) = (&self.bias, &plan.bias_spec) {
            self.bias = Some(cut(bias, spec, place("bias")));
        }
        self.plan = plan;
        Ok(())
    }
}

/// The part of a parameter that every rank of a group holds in full.
fn whole(spec: &ShardSpec, group: &Group) -> ShardSpec {
    ShardSpec::whole(&spec.global_shape, spec.axis, group.rank(), group.size())
}

fn config_of(
    config: &ParallelLinearConfig,
    rule: &Rule,
    path: &str,
    group: &Group,
) -> Result<ParallelLinearConfig, ParallelError> {
    let config = config.clone().with_name(path);
    let (config, features) = match rule.style {
        Style::Row => {
            let config = config.with_split(Split::Row).with_input_is_parallel(true);
            let features = config.d_input;
            (config, features)
        }
        style => {
            let config = config
                .with_split(Split::Column)
                .with_gather_output(style == Style::ColumnGathered);
            let features = config.d_output;
            (config, features)
        }
    };
    let Some(heads) = rule.heads else {
        return Ok(config);
    };
    let refuse = |why: String| {
        Err(ParallelError::Config {
            layer: "parallelize",
            name: path.into(),
            why,
        })
    };
    if heads == 0 || !features.is_multiple_of(heads) {
        return refuse(format!(
            "its {features} split features are no {heads} heads of equal size"
        ));
    }
    let ranks = group.size();
    if !heads.is_multiple_of(ranks) && !rule.shared_heads {
        return refuse(format!(
            "{heads} heads are not divisible over {ranks} ranks; use a divisor of {heads} as the number \
            of ranks or, for keys and values that several query heads use, `shared_heads`"
        ));
    }
    if rule.style == Style::ColumnGathered {
        return refuse("gathered outputs have no heads that stay whole; leave `heads` out".into());
    }
    Ok(config.with_parts([FusedPart::units(heads, features / heads)]))
}
