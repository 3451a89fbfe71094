//! The optimizer state that this rank holds, for a checkpoint.

use std::{collections::BTreeMap, ops::Range};

use burn::{
    Tensor,
    tensor::{Bytes, DType, FloatDType, TensorData},
};
use megaburn_kernels::{Fp8Moment, PendingHash, Runs, joined_master, unpacked_moment};
use megaburn_mesh::ParamSpec;

use crate::{
    error::OptimError,
    masters::is_remainder,
    moment::Moment,
    offload::{D2hCopy, HostSlot, OffloadedTensor, What},
    optimizer::Optimizer,
};

/// The part of a tensor of optimizer state that this rank holds.
#[derive(Clone, Debug)]
pub struct StateTensor {
    slot: HostSlot,
    form: Form,
    /// The range of the flattened local parameter that it belongs to.
    pub range: Range<usize>,
    /// The ranks that hold the same range: this rank's position among them, and their number.
    /// Tensor-parallel copies are not counted.
    pub copies: (usize, usize),
}

/// What the elements of a stored tensor are.
#[derive(Clone, Debug)]
enum Form {
    /// The values.
    Values,
    /// What this part of a parameter lacks of its master.
    Remainder(Box<Tensor<1>>),
    /// A moment in 8 bits.
    Fp8(Fp8Moment),
}

impl StateTensor {
    /// Element type of the values.
    pub fn dtype(&self) -> DType {
        match self.form {
            Form::Values => self.slot.dtype(),
            Form::Remainder(_) | Form::Fp8(_) => DType::F32,
        }
    }

    /// Reads a part of the values: the elements `range` of the flattened local parameter.
    ///
    /// # Shapes
    /// `[range.len()]`
    /// # Errors
    /// The device cannot be read.
    ///
    /// # Panics
    /// If this rank does not hold the range.
    pub fn read(self, range: Range<usize>) -> Result<TensorData, OptimError> {
        self.part(range).read()
    }

    /// Hashes elements of the flattened local parameter: one hash for each pair of runs and the indices
    /// among their elements. Offloaded values are fetched for that.
    ///
    /// # Errors
    /// The device cannot be read, or computing the values failed.
    ///
    /// # Panics
    /// If this rank does not hold an element.
    pub fn hashes(self, elements: &[(Runs, Range<usize>)]) -> Result<Vec<PendingHash>, OptimError> {
        let range = self.range.clone();
        let values = self.part(range.clone()).slot.tensor();
        let hash = |(runs, indices): &(Runs, Range<usize>)| {
            let hash = PendingHash::of(values.clone(), range.start, *runs, indices.clone());
            hash.map_err(|why| OptimError::Device { why })
        };
        elements.iter().map(hash).collect()
    }

    /// Starts to copy a part of the values to host memory, which later updates do not change. On
    /// GPUs the host does not wait; drop the copy in flight before the next update, so that it need
    /// not copy the state on the device.
    ///
    /// # Errors
    /// The host memory cannot be allocated.
    ///
    /// # Panics
    /// If this rank does not hold the range, or the range is empty.
    pub fn copy_to_host(
        self,
        range: Range<usize>,
    ) -> Result<(HostPart, Option<D2hCopy>), OptimError> {
        assert!(!range.is_empty(), "there is nothing to copy");
        let is_made = !matches!(self.form, Form::Values);
        let Part { slot, start, len } = self.part(range);
        match slot {
            HostSlot::Here(tensor) => {
                let (host, copy) = HostPart::copy_of(tensor.narrow(0, start, len))?;
                // Values that were made for the copy need not stay on the device: what is enqueued
                // next waits for the copy there.
                Ok((host, (!is_made).then_some(copy)))
            }
            HostSlot::OffloadedTensor(host) => Ok((HostPart { host, start, len }, None)),
        }
    }

    fn part(self, range: Range<usize>) -> Part {
        let held = &self.range;
        assert!(
            held.start <= range.start && range.end <= held.end,
            "{range:?} is not in {held:?}"
        );
        let slot = match self.form {
            Form::Values => self.slot,
            Form::Remainder(param) => HostSlot::Here(joined_master(*param, self.slot.tensor())),
            Form::Fp8(code) => {
                HostSlot::Here(unpacked_moment(self.slot.tensor(), held.len(), code))
            }
        };
        Part {
            start: range.start - held.start,
            len: range.len(),
            slot,
        }
    }
}

struct Part {
    slot: HostSlot,
    start: usize,
    len: usize,
}

impl Part {
    fn read(self) -> Result<TensorData, OptimError> {
        let (start, len) = (self.start, self.len);
        if len == 0 {
            return Ok(TensorData::from_bytes_vec(
                Vec::new(),
                [0],
                self.slot.dtype(),
            ));
        }
        match self.slot {
            HostSlot::Here(tensor) => read(tensor.narrow(0, start, len)),
            HostSlot::OffloadedTensor(host) => HostPart { host, start, len }.read(),
        }
    }
}

/// A tensor in host memory, or a part of one.
#[derive(Clone, Debug)]
pub struct HostPart {
    host: OffloadedTensor,
    start: usize,
    len: usize,
}

impl HostPart {
    /// Starts to copy a tensor to host memory, pinned if it is on a GPU. The memory is kept for later
    /// copies of the same size. A tensor that is in host memory is not copied but shared, so that a
    /// later update writes to new memory.
    ///
    /// # Errors
    /// The host memory cannot be allocated.
    ///
    /// # Panics
    /// If the tensor is empty.
    pub fn copy_of(tensor: Tensor<1>) -> Result<(Self, D2hCopy), OptimError> {
        let len = tensor.shape().num_elements();
        let (host, copy) = OffloadedTensor::store(tensor, None)?;
        Ok((
            Self {
                host,
                start: 0,
                len,
            },
            copy,
        ))
    }

    /// The values; this thread waits for them. They are not copied, but share the host memory.
    ///
    /// # Errors
    /// The device cannot be read, or computing the values failed.
    pub fn read(self) -> Result<TensorData, OptimError> {
        let data = self.host.read()?;
        if data.num_elements() == self.len {
            return Ok(data);
        }
        let dtype = data.dtype();
        let bytes = self.start * dtype.size()..(self.start + self.len) * dtype.size();
        let all = data.into_bytes();
        let part = all.view(bytes.start, bytes.end);
        let part = part.unwrap_or_else(|_| Bytes::from_bytes_vec(all[bytes].to_vec()));
        Ok(TensorData::from_bytes(part, [self.len], dtype))
    }
}

/// The optimizer state that this rank holds, by the path of the parameter.
#[derive(Debug, Default)]
pub struct HeldState {
    /// The f32 masters of narrower parameters, and sharded parameters that have no master.
    pub masters: BTreeMap<String, StateTensor>,
    /// Empty before the first step.
    pub moments: BTreeMap<(Moment, String), StateTensor>,
}

/// A tensor of optimizer state that this rank holds from the first step on, without its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// `None` for a master, or for a sharded parameter that has none.
    pub moment: Option<Moment>,
    /// Element type.
    pub dtype: DType,
    /// As [`StateTensor::range`].
    pub range: Range<usize>,
    /// As [`StateTensor::copies`].
    pub copies: (usize, usize),
}

impl Optimizer {
    /// The state that [`held_state`](Self::held_state) returns for a parameter of type `dtype` after
    /// the first step, empty if it is frozen; nothing needs to be allocated.
    pub fn state_shapes(&self, path: &str, spec: &ParamSpec, dtype: FloatDType) -> Vec<StateShape> {
        if !self.sharding.is_trainable(path) {
            return Vec::new();
        }
        let replicas = self.sharding.replicas_of(path).copies();
        let num_elements = spec.shard.local_shape().iter().product();
        let shape = |moment, dtype| StateShape {
            moment,
            dtype,
            range: self.sharding.kept(path, num_elements),
            copies: (replicas.rank(), replicas.size()),
        };
        let dtype = if self.f32_params.contains(path) {
            DType::F32
        } else {
            dtype.into()
        };
        let master = if self.has_master(dtype) {
            Some(DType::F32)
        } else {
            self.sharding.is_param_sharded(path).then_some(dtype)
        };
        let moments = self.rule.moments(path, spec).into_iter();
        let moments = moments.map(|(moment, dtype)| shape(Some(moment), dtype.computed().into()));
        master
            .map(|dtype| shape(None, dtype))
            .into_iter()
            .chain(moments)
            .collect()
    }

    /// The masters and moments that this rank holds; nothing is copied. `num_elements` returns the
    /// number of elements of a local parameter. `param` returns a flattened local parameter, where
    /// it is not sharded and its master is stored as a
    /// [remainder](Optimizer::with_param_remainders).
    pub fn held_state(
        &self,
        num_elements: impl Fn(&str) -> usize,
        mut param: impl FnMut(&str) -> Tensor<1>,
    ) -> HeldState {
        let mut held = HeldState::default();
        let tensor = |path: &str, slot: HostSlot, form| {
            let copies = self.sharding.replicas_of(path).copies();
            StateTensor {
                slot,
                form,
                range: self.sharding.kept(path, num_elements(path)),
                copies: (copies.rank(), copies.size()),
            }
        };
        for (key, slot) in self.state.iter() {
            let path = key.path.as_str();
            match key.what {
                What::Master => {
                    let form = match is_remainder(slot) {
                        true => Form::Remainder(Box::new(self.kept_param(path, || param(path)))),
                        false => Form::Values,
                    };
                    let state = tensor(path, slot.clone(), form);
                    held.masters.insert(path.to_string(), state);
                }
                What::Moment(moment) => {
                    let code = self.rule.moment_dtype(moment).code(moment);
                    let state = tensor(path, slot.clone(), code.map_or(Form::Values, Form::Fp8));
                    held.moments.insert((moment, path.to_string()), state);
                }
            }
        }
        let slots = self.sharding.buckets().iter().flat_map(|b| &b.slots);
        for path in slots.map(|slot| &slot.path) {
            if !held.masters.contains_key(path)
                && let Some(part) = self.sharding.part(path)
            {
                let part = tensor(path, HostSlot::Here(part), Form::Values);
                held.masters.insert(path.clone(), part);
            }
        }
        held
    }

    /// The part that this rank keeps of a parameter; `param` returns the flattened local parameter,
    /// where it is not sharded.
    fn kept_param(&self, path: &str, param: impl FnOnce() -> Tensor<1>) -> Tensor<1> {
        self.sharding.part(path).unwrap_or_else(|| {
            let param = param();
            let kept = self.sharding.kept(path, param.dims()[0]);
            match kept.is_empty() {
                true => Tensor::empty([0], (&param.device(), param.dtype())),
                false => param.narrow(0, kept.start, kept.len()),
            }
        })
    }
}

fn read(tensor: Tensor<1>) -> Result<TensorData, OptimError> {
    tensor.try_into_data().map_err(|error| OptimError::Device {
        why: error.to_string(),
    })
}
