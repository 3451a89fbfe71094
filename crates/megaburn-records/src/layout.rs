use burn::config::Config;

/// The names and orientations of the tensors in a file.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Burn's: a linear weight is `[d_input, d_output]`, a norm has `gamma` and `beta`.
    Burn,
    /// PyTorch's: a linear weight is `[d_output, d_input]`, a norm has `weight` and `bias`, and the
    /// variants of enums are not in the paths.
    Torch,
}

/// Layers whose weight PyTorch stores transposed.
const LINEAR: [&str; 3] = [
    "Struct:Linear",
    "Struct:ParallelLinear",
    "Struct:ReplicatedLinear",
];

/// Layers whose `gamma` and `beta` PyTorch calls `weight` and `bias`.
const NORMS: [&str; 5] = [
    "Struct:BatchNorm",
    "Struct:GroupNorm",
    "Struct:LayerNorm",
    "Struct:Norm",
    "Struct:RmsNorm",
];

/// A parameter's place in a module: the names of the fields down to it, and the types that have
/// these fields.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    pub(crate) names: Vec<String>,
    pub(crate) containers: Vec<String>,
}

impl Place {
    pub(crate) fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.to_string());
        self.containers.push(container.to_string());
    }

    pub(crate) fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    /// The path as Burn and the shard plan have it.
    pub(crate) fn path(&self) -> String {
        self.names.join(".")
    }

    /// The struct or enum that declares the parameter.
    fn layer(&self) -> &str {
        let is_type = |name: &&String| name.starts_with("Struct:") || name.starts_with("Enum:");
        self.containers
            .iter()
            .rev()
            .find(is_type)
            .map_or("", String::as_str)
    }
}

impl Layout {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Burn => "Burn's ([d_input, d_output], `gamma` and `beta`)",
            Self::Torch => "PyTorch's ([d_output, d_input], `weight` and `bias`)",
        }
    }

    /// The name of a parameter's tensor.
    pub(crate) fn tensor_name(self, place: &Place) -> String {
        if self == Self::Burn {
            return place.path();
        }
        let is_norm = NORMS.contains(&place.layer());
        let last = place.names.len().saturating_sub(1);
        let mut names = Vec::new();
        for (index, name) in place.names.iter().enumerate() {
            if place.containers[index].starts_with("Enum:") {
                continue;
            }
            names.push(match name.as_str() {
                "gamma" if is_norm && index == last => "weight",
                "beta" if is_norm && index == last => "bias",
                name => name,
            });
        }
        names.join(".")
    }

    /// Whether a file may have a tensor that no module of Burn's has: PyTorch's batch norms count
    /// their batches.
    pub(crate) fn ignores(self, name: &str) -> bool {
        let last = name.rsplit('.').next();
        self == Self::Torch && last == Some("num_batches_tracked")
    }

    /// Whether the tensor is the transposed parameter.
    pub(crate) fn transposes(self, place: &Place, dims: usize) -> bool {
        let is_weight = place.names.last().is_some_and(|name| name == "weight");
        self == Self::Torch && dims == 2 && is_weight && LINEAR.contains(&place.layer())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(parts: &[(&str, &str)]) -> Place {
        let mut place = Place::default();
        for (name, container) in parts {
            place.enter(name, container);
        }
        place
    }

    #[test]
    fn torch_has_other_names_and_transposed_weights() {
        let net = ("layers", "Struct:Net");
        let weight = place(&[net, ("0", "Vec"), ("weight", "Struct:ParallelLinear")]);
        assert_eq!(Layout::Torch.tensor_name(&weight), "layers.0.weight");
        assert!(Layout::Torch.transposes(&weight, 2));
        assert!(!Layout::Burn.transposes(&weight, 2));
        let gamma = place(&[net, ("gamma", "Struct:LayerNorm")]);
        assert_eq!(Layout::Torch.tensor_name(&gamma), "layers.weight");
        assert_eq!(Layout::Burn.tensor_name(&gamma), "layers.gamma");
        let variant = place(&[net, ("Dense", "Enum:Ffn"), ("weight", "Struct:Embedding")]);
        assert_eq!(Layout::Torch.tensor_name(&variant), "layers.weight");
        assert_eq!(Layout::Burn.tensor_name(&variant), "layers.Dense.weight");
        assert!(!Layout::Torch.transposes(&variant, 2));
    }
}
