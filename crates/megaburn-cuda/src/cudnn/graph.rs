//! A computation as a cuDNN graph: tensors of rank four and operations on them.

use super::{
    api::Api,
    descriptor::Descriptor,
    names::{Attribute, DataType, Kind, Pointwise, Raw, Reduction},
};
use crate::error::CudaError;

/// Sizes of `[b, h, s, d]`, cuDNN's order, and strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) sizes: [i64; 4],
    pub(super) strides: [i64; 4],
}

impl Layout {
    /// The contiguous layout.
    pub(super) fn packed(sizes: [i64; 4]) -> Self {
        let [_, h, s, d] = sizes;
        Self {
            sizes,
            strides: [h * s * d, s * d, d, 1],
        }
    }

    /// The layout with the last two dimensions swapped, in the same memory.
    pub(super) fn transposed(self) -> Self {
        let swap = |[b, h, s, d]: [i64; 4]| [b, h, d, s];
        Self {
            sizes: swap(self.sizes),
            strides: swap(self.strides),
        }
    }

    /// The number of elements from the first to the last, including gaps.
    pub(super) fn extent(&self) -> i64 {
        1 + self
            .sizes
            .iter()
            .zip(self.strides)
            .map(|(size, stride)| (size - 1) * stride)
            .sum::<i64>()
    }
}

/// The input and output tensors in device memory; the discriminant is the tensor's id.
#[repr(i64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Queries = 1,
    Keys,
    Values,
    Out,
    /// Row-wise log-sum-exp.
    Lse,
    OutGradient,
    QueriesGradient,
    KeysGradient,
    ValuesGradient,
    /// Row sums of the output times its gradient.
    Delta,
    /// Accumulator for the gradient of the queries.
    QueriesSum,
}

/// The scalar inputs; the discriminant is the tensor's id.
#[repr(i64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    /// The factor of the scores.
    Scale = 50,
    One,
    /// The score of an unseen key.
    Unseen,
}

/// The first id of virtual tensors, which exist only within an engine.
const BETWEEN: i64 = 100;
/// The alignment of every address in bytes, because engines move 16 bytes at a time.
pub(super) const ALIGNMENT: i64 = 16;

/// A tensor of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    raw: Raw,
    pub(super) layout: Layout,
}

/// Operations in execution order, and everything that they refer to.
#[derive(Debug)]
pub(super) struct Graph {
    api: &'static Api,
    /// Tensors, and the operations' other descriptors.
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    next: i64,
}

impl Graph {
    pub(super) fn new(api: &'static Api) -> Self {
        Self {
            api,
            parts: Vec::new(),
            operations: Vec::new(),
            next: BETWEEN,
        }
    }

    pub(super) fn operations(&self) -> Vec<Raw> {
        self.operations.iter().map(Descriptor::raw).collect()
    }

    /// Adds a tensor in device memory.
    pub(super) fn outside(
        &mut self,
        role: Role,
        layout: Layout,
        dtype: DataType,
    ) -> Result<Node, CudaError> {
        self.tensor(role as i64, layout, dtype, None)
    }

    /// Adds an f32 scalar that is passed by value.
    pub(super) fn number(&mut self, number: Number) -> Result<Node, CudaError> {
        let layout = Layout::packed([1; 4]);
        self.tensor(
            number as i64,
            layout,
            DataType::F32,
            Some(Attribute::TensorIsByValue),
        )
    }

    /// Adds a virtual tensor, which exists only within an engine.
    pub(super) fn between(&mut self, layout: Layout, dtype: DataType) -> Result<Node, CudaError> {
        let id = self.next;
        self.next += 1;
        self.tensor(id, layout, dtype, Some(Attribute::TensorIsVirtual))
    }

    fn tensor(
        &mut self,
        id: i64,
        layout: Layout,
        dtype: DataType,
        flag: Option<Attribute>,
    ) -> Result<Node, CudaError> {
        let mut tensor = Descriptor::new(self.api, Kind::Tensor)?
            .with(Attribute::TensorDataType, &[dtype])?
            .with(Attribute::TensorDimensions, &layout.sizes)?
            .with(Attribute::TensorStrides, &layout.strides)?
            .with(Attribute::TensorId, &[id])?
            .with(Attribute::TensorAlignment, &[ALIGNMENT])?;
        if let Some(flag) = flag {
            tensor = tensor.with(flag, &[true])?;
        }
        let tensor = tensor.finished()?;
        let raw = tensor.raw();
        self.parts.push(tensor);
        Ok(Node { raw, layout })
    }

    /// Adds the batched matrix product `a b`.
    pub(super) fn multiply(&mut self, a: Node, b: Node, into: Node) -> Result<Node, CudaError> {
        let how = Descriptor::new(self.api, Kind::Matmul)?
            .with(Attribute::MatmulComputeType, &[DataType::F32])?
            .finished()?;
        let operation = Descriptor::new(self.api, Kind::MatmulOperation)?
            .with(Attribute::MatmulOperation, &[how.raw()])?
            .with(Attribute::MatmulA, &[a.raw])?
            .with(Attribute::MatmulB, &[b.raw])?
            .with(Attribute::MatmulC, &[into.raw])?;
        self.push(operation, Some(how), into)
    }

    /// Adds the elementwise operation `mode` on `x`, in f32 within the engine.
    pub(super) fn unary(&mut self, mode: Pointwise, x: Node) -> Result<Node, CudaError> {
        let into = self.between(x.layout, DataType::F32)?;
        self.pointwise((mode, DataType::F32), &[x], into)
    }

    /// Like [`unary`](Self::unary), on `x` and `b`; sizes of one in `b` are broadcast.
    pub(super) fn binary(&mut self, mode: Pointwise, x: Node, b: Node) -> Result<Node, CudaError> {
        let into = self.between(x.layout, DataType::F32)?;
        self.pointwise((mode, DataType::F32), &[x, b], into)
    }

    /// Adds an elementwise operation on one to three tensors, computed in the given type.
    pub(super) fn pointwise(
        &mut self,
        (mode, precision): (Pointwise, DataType),
        inputs: &[Node],
        into: Node,
    ) -> Result<Node, CudaError> {
        let how = self.mode(mode, precision)?.finished()?;
        self.push_pointwise(how, inputs, into)
    }

    /// Adds a tensor with each element's index along a dimension.
    pub(super) fn index(&mut self, like: Node, dimension: i64) -> Result<Node, CudaError> {
        let how = self
            .mode(Pointwise::Index, DataType::F32)?
            .with(Attribute::PointwiseAxis, &[dimension])?
            .finished()?;
        let into = self.between(like.layout, DataType::I32)?;
        self.push_pointwise(how, &[like], into)
    }

    fn mode(&self, mode: Pointwise, precision: DataType) -> Result<Descriptor, CudaError> {
        Descriptor::new(self.api, Kind::Pointwise)?
            .with(Attribute::PointwiseMode, &[mode])?
            .with(Attribute::PointwiseMathPrecision, &[precision])
    }

    fn push_pointwise(
        &mut self,
        how: Descriptor,
        inputs: &[Node],
        into: Node,
    ) -> Result<Node, CudaError> {
        let mut operation = Descriptor::new(self.api, Kind::PointwiseOperation)?
            .with(Attribute::PointwiseOperation, &[how.raw()])?
            .with(Attribute::PointwiseY, &[into.raw])?
            .with(Attribute::PointwiseAlpha1, &[1f32])?
            .with(Attribute::PointwiseAlpha2, &[1f32])?;
        let places = [
            Attribute::PointwiseX,
            Attribute::PointwiseB,
            Attribute::PointwiseT,
        ];
        for (input, place) in inputs.iter().zip(places) {
            operation = operation.with(place, &[input.raw])?;
        }
        self.push(operation, Some(how), into)
    }

    /// Adds a reduction along the dimensions in which `into` has size one.
    pub(super) fn reduce(
        &mut self,
        operator: Reduction,
        x: Node,
        into: Node,
    ) -> Result<Node, CudaError> {
        let how = Descriptor::new(self.api, Kind::Reduction)?
            .with(Attribute::ReductionOperator, &[operator])?
            .with(Attribute::ReductionComputeType, &[DataType::F32])?
            .finished()?;
        let operation = Descriptor::new(self.api, Kind::ReductionOperation)?
            .with(Attribute::ReductionOperation, &[how.raw()])?
            .with(Attribute::ReductionX, &[x.raw])?
            .with(Attribute::ReductionY, &[into.raw])?;
        self.push(operation, Some(how), into)
    }

    /// Adds a tensor with the elements of `x` under another layout.
    pub(super) fn view(
        &mut self,
        x: Node,
        layout: Layout,
        dtype: DataType,
    ) -> Result<Node, CudaError> {
        let into = self.between(layout, dtype)?;
        let operation = Descriptor::new(self.api, Kind::ReshapeOperation)?
            .with(Attribute::ReshapeX, &[x.raw])?
            .with(Attribute::ReshapeY, &[into.raw])?;
        self.push(operation, None, into)
    }

    fn push(
        &mut self,
        operation: Descriptor,
        how: Option<Descriptor>,
        result: Node,
    ) -> Result<Node, CudaError> {
        self.operations.push(operation.finished()?);
        self.parts.extend(how);
        Ok(result)
    }
}
