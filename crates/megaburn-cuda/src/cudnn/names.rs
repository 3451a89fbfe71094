//! The constants of cuDNN's graph interface that are used here, from `cudnn_graph.h` of version 9.

use std::ffi::{c_int, c_void};

/// The type of a descriptor: `cudnnBackendDescriptorType_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
    #[cfg(test)]
    DeviceProperties = 38,
}

/// An attribute that is set in a descriptor or read from it: `cudnnBackendAttributeName_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwiseMathPrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    #[cfg(test)]
    HeuristicsDevice = 204,
    PlanHandle = 400,
    PlanEngineConfig = 401,
    PlanWorkspaceSize = 402,
    #[cfg(test)]
    PlanDevice = 407,
    PointwiseOperation = 750,
    PointwiseX = 751,
    PointwiseB = 752,
    PointwiseY = 753,
    PointwiseAlpha1 = 754,
    PointwiseAlpha2 = 755,
    PointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    MatmulComputeType = 1500,
    MatmulA = 1520,
    MatmulB = 1521,
    MatmulC = 1522,
    MatmulOperation = 1523,
    ReductionOperator = 1600,
    ReductionComputeType = 1601,
    ReductionX = 1610,
    ReductionY = 1611,
    ReductionOperation = 1612,
    ReshapeX = 2200,
    ReshapeY = 2201,
    #[cfg(test)]
    DeviceJson = 2702,
}

/// A tensor's element type: `cudnnDataType_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataType {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

/// An elementwise operation: `cudnnPointwiseMode_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pointwise {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exponential = 13,
    Logarithm = 15,
    Identity = 21,
    AtLeast = 303,
    Index = 501,
    Select = 601,
}

/// A reduction: `cudnnReduceTensorOp_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum = 0,
    Maximum = 3,
}

/// A heuristic that suggests engines: `cudnnBackendHeurMode_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heuristic {
    A = 3,
}

/// A library handle, `cudnnHandle_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) *mut c_void);

/// A raw descriptor handle, `cudnnBackendDescriptor_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw(pub(super) *mut c_void);

/// The address of a tensor on the device or, for a tensor passed by value, on the host.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Address(pub(super) *mut c_void);

/// A type that attribute values can have.
pub(super) trait Value: Copy {
    /// The `cudnnBackendAttributeType_t` of the type.
    const TYPE: c_int;
}

macro_rules! values {
    ($($value:ty = $number:literal),* $(,)?) => {
        $(impl Value for $value {
            const TYPE: c_int = $number;
        })*
    };
}

values! {
    Handle = 0,
    DataType = 1,
    bool = 2,
    i64 = 3,
    f32 = 4,
    Address = 6,
    Heuristic = 8,
    Pointwise = 14,
    Raw = 15,
    Reduction = 18,
}

#[cfg(test)]
values! { u8 = 24 }
