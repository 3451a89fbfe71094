use burn::{config::Config, nn::Initializer, prelude::Device};
use megaburn_kernels::{RouterGroups, RouterOptions, RouterScores};
use megaburn_mesh::{Axis, FusedPart};

use super::{
    ExpertGroups, ExpertMlp, Moe, MoeOptions, MoeParts, Router, SharedGate, router::RouterParts,
};
use crate::{
    error::ParallelError,
    init::named,
    linear::{LinearPrecision, ParallelLinear, ParallelLinearConfig},
    mlp::{Activation, Mlp, MlpConfig},
};

/// Configuration of a mixture-of-experts layer, [`Moe`].
#[derive(Config, Debug)]
pub struct MoeConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Features of the hidden layer of an expert.
    pub d_ffn: usize,
    /// Number of experts.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Features of the hidden layer of the shared expert, which every token uses; `None` has no
    /// shared expert.
    pub shared_ffn: Option<usize>,
    /// Whether the output of the shared expert is multiplied by a gate of each token.
    #[config(default = false)]
    pub shared_gate: bool,
    /// The function between an expert's matrices.
    #[config(default = "Activation::SwiGlu")]
    pub activation: Activation,
    /// Whether an expert's score is the sigmoid of its logit, instead of a softmax over all
    /// experts.
    #[config(default = false)]
    pub sigmoid: bool,
    /// Whether the weights of a token's experts are divided by their sum.
    #[config(default = true)]
    pub normalise: bool,
    /// Factor on the weights after that normalization.
    #[config(default = 1.0)]
    pub scale: f64,
    /// Group-limited routing `[groups, groups per token, scores per group]`, as in DeepSeek: a
    /// token chooses experts only from its best groups of neighbouring experts, and a group's score
    /// is the sum of its best expert scores. `None` means one group.
    pub groups: Option<[usize; 3]>,
    /// Whether the matrices of the experts and of the shared expert have biases.
    #[config(default = false)]
    pub bias: bool,
    /// Whether the router adds a bias with a gradient to each logit (gpt-oss).
    #[config(default = false)]
    pub router_bias: bool,
    /// Whether each expert has a bias that is used for the choice only (`noaux_tc`).
    #[config(default = false)]
    pub expert_bias: bool,
    /// Whether input and output are sharded along the sequence. Required with tensor parallelism.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Whether backward recomputes the experts' activation instead of keeping its output.
    #[config(default = false)]
    pub recompute: bool,
    /// How the matrices of the shared expert are quantised for their products; `None` multiplies
    /// them as they are.
    pub precision: Option<LinearPrecision>,
    /// How the matrices of the routed experts are quantised: each expert's by itself.
    pub expert_precision: Option<LinearPrecision>,
    /// Initializer of the router, the gate of the shared expert, and the up (and gate) matrices.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// Initializer of the down matrices.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

named!(MoeConfig);

impl MoeConfig {
    /// Builds the router, this rank's experts and its shard of the shared expert.
    ///
    /// # Errors
    /// Sizes that contradict each other, ranks that do not divide the experts, or tensor
    /// parallelism without sequence parallelism; see also [`ParallelLinearConfig::init`].
    /// # Collective
    /// Nothing is sent; every member draws its own part.
    pub fn init(
        &self,
        groups: impl Into<ExpertGroups>,
        options: MoeOptions,
        device: &Device,
    ) -> Result<Moe, ParallelError> {
        let groups = groups.into();
        self.check(&groups)?;
        let own = groups.own(self.num_experts);
        let expert = |index: usize| {
            own.contains(&index)
                .then(|| self.expert(index, &groups, device))
                .transpose()
        };
        let shared = self
            .shared_ffn
            .map(|d_ffn| self.shared(d_ffn, &groups, device))
            .transpose()?;
        let gate = || {
            SharedGate::new(
                self.d_model,
                self.sequence_parallel,
                &self.initializer,
                self.path_of("shared_gate"),
                &groups.tp,
                device,
            )
        };
        let shared_gate = self.shared_gate.then(gate).transpose()?;
        Ok(Moe {
            router: Router::new(self.router(&groups, options), device)?,
            experts: (0..self.num_experts)
                .map(expert)
                .collect::<Result<_, _>>()?,
            shared,
            shared_gate,
            parts: MoeParts {
                groups,
                activation: self.activation,
                dispatcher: options.dispatcher,
                grouped_gemm: options.grouped_gemm,
                recompute: self.recompute,
            },
        })
    }

    fn expert(
        &self,
        index: usize,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<ExpertMlp, ParallelError> {
        let Self {
            d_model,
            d_ffn,
            activation,
            ..
        } = *self;
        let up = if activation.is_gated() {
            ParallelLinearConfig::column(d_model, 2 * d_ffn)
                .with_parts([FusedPart::new(d_ffn), FusedPart::new(d_ffn)])
        } else {
            ParallelLinearConfig::column(d_model, d_ffn)
        };
        let down = ParallelLinearConfig::row(d_ffn, d_model);
        let matrix = |mut config: ParallelLinearConfig, field, initializer: &Initializer| {
            config.path = self.path_of(&format!("experts.{index}.{field}"));
            config.precision = self.expert_precision;
            let config = config.with_axis(Axis::Etp).with_bias(self.bias);
            config
                .with_initializer(initializer.clone())
                .with_bias_initializer(Some(Initializer::Zeros))
                .init(&groups.etp, device)
        };
        let up: ParallelLinear = matrix(up, "up", &self.initializer)?;
        Ok(ExpertMlp {
            up,
            down: matrix(down, "down", &self.output_initializer)?,
        })
    }

    fn shared(
        &self,
        d_ffn: usize,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Mlp, ParallelError> {
        let mut config = MlpConfig::new(self.d_model, d_ffn)
            .with_activation(self.activation)
            .with_bias(self.bias)
            .with_sequence_parallel(self.sequence_parallel)
            .with_recompute(self.recompute)
            .with_initializer(self.initializer.clone())
            .with_output_initializer(self.output_initializer.clone());
        config.path = self.path_of("shared");
        config.precision = self.precision;
        config.init(&groups.tp, device)
    }

    fn router(&self, groups: &ExpertGroups, options: MoeOptions) -> RouterParts {
        let router_groups = |[num, kept, best]: [usize; 3]| RouterGroups { num, kept, best };
        RouterParts {
            d_model: self.d_model,
            num_experts: self.num_experts,
            options: RouterOptions {
                top_k: self.top_k,
                scores: if self.sigmoid {
                    RouterScores::Sigmoid
                } else {
                    RouterScores::Softmax
                },
                normalise: self.normalise,
                scale: self.scale,
                groups: self.groups.map(router_groups),
            },
            expert_bias: self.expert_bias,
            logit_bias: self.router_bias,
            sequence_parallel: self.sequence_parallel,
            initializer: self.initializer.clone(),
            path: self.path_of("router"),
            groups: groups.clone(),
            balance: options.balance,
            capacity: options.capacity,
        }
    }

    fn path_of(&self, part: &str) -> Option<String> {
        self.path.as_ref().map(|path| format!("{path}.{part}"))
    }

    fn check(&self, groups: &ExpertGroups) -> Result<(), ParallelError> {
        let refuse = |why: String| {
            let name = self.path.clone().unwrap_or_else(|| "unnamed".into());
            Err(ParallelError::Config {
                layer: "Moe",
                name,
                why,
            })
        };
        let Self {
            num_experts, top_k, ..
        } = *self;
        let tp = groups.tp.size();
        let ep = groups.ep.size();
        if top_k == 0 || top_k > num_experts {
            return refuse(format!(
                "top_k {top_k} must be between 1 and the number of experts, \
                                  {num_experts}"
            ));
        }
        if self.shared_gate && self.shared_ffn.is_none() {
            return refuse(
                "`shared_gate` is true, but there is no shared expert: set `shared_ffn`".into(),
            );
        }
        if !num_experts.is_multiple_of(ep) {
            return refuse(format!(
                "{num_experts} experts are not divisible by {ep} expert-parallel ranks: use a \
                multiple of {ep}, or a smaller ep"
            ));
        }
        if tp > 1 && !self.sequence_parallel {
            return refuse(format!(
                "{tp} tensor-parallel ranks without sequence parallelism: every expert would see each token \
                 {tp} times; add `-sp` to the layout"
            ));
        }
        let Some([num, kept, best]) = self.groups else {
            return Ok(());
        };
        if num == 0 || !num_experts.is_multiple_of(num) {
            return refuse(format!(
                "{num_experts} experts are not divisible by {num} groups"
            ));
        }
        let of_group = num_experts / num;
        if kept == 0 || kept > num || best == 0 || best > of_group {
            return refuse(format!(
                "group-limited routing cannot keep {kept} of {num} groups by the best {best} of \
                {of_group} experts each: both numbers must be at least 1 and at most the total"
            ));
        }
        if top_k > kept * of_group {
            return refuse(format!(
                "top_k {top_k} is more than the experts of {kept} groups of {of_group}"
            ));
        }
        Ok(())
    }
}
