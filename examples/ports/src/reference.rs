//! A model's `reference.safetensors`: what Transformers computes of a batch, as
//! `tests/tools/hf_reference.py` writes it.

use std::{error::Error, path::Path};

use burn::{
    prelude::{Bool, Device, Int},
    store::{ModuleStore, SafetensorsStore, bridge},
    tensor::{Tensor, TensorData},
};

/// The tensors of a file, on a device.
pub struct Reference {
    tensors: Vec<(String, TensorData)>,
    device: Device,
}

impl Reference {
    pub fn read(folder: &Path, device: &Device) -> Result<Self, Box<dyn Error>> {
        let mut store = SafetensorsStore::from_file(folder.join("reference.safetensors"));
        let mut tensors = Vec::new();
        for (name, tensor) in store.get_all_tensors()? {
            if !name.starts_with("grad.") {
                tensors.push((name.clone(), bridge::to_data(tensor)?));
            }
        }
        Ok(Self {
            tensors,
            device: device.clone(),
        })
    }

    /// The values of a tensor.
    pub fn data(&self, name: &str) -> TensorData {
        let found = self.tensors.iter().find(|(other, _)| other == name);
        found
            .unwrap_or_else(|| panic!("the reference has no tensor `{name}`"))
            .1
            .clone()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.data(name).iter::<f32>().collect()
    }

    pub fn ints<const D: usize>(&self, name: &str) -> Tensor<D, Int> {
        Tensor::from_data(self.data(name), &self.device)
    }

    /// The places where an integer is `value`.
    pub fn equal<const D: usize>(&self, name: &str, value: i64) -> Tensor<D, Bool> {
        self.ints::<D>(name).equal_elem(value)
    }
}
