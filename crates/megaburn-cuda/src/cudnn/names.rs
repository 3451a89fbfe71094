//! cuDNN's numbers for what is used of its graph interface, as `cudnn_graph.h` of version 9 has them.

use std::ffi::{c_int, c_void};

/// What a descriptor describes: `cudnnBackendDescriptorType_t`.
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

/// What is set in a descriptor or read from it: `cudnnBackendAttributeName_t`.
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

/// `cudnnDataType_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataType {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

/// `cudnnPointwiseMode_t`.
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

/// `cudnnReduceTensorOp_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum = 0,
    Maximum = 3,
}

/// `cudnnBackendHeurMode_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heuristic {
    A = 3,
}

/// A library handle, `cudnnHandle_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle(pub(super) *mut c_void);

/// A descriptor as the library knows it, `cudnnBackendDescriptor_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw(pub(super) *mut c_void);

/// An address on the device or, of a tensor by value, on the host.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Address(pub(super) *mut c_void);

/// A type of values that attributes have.
pub(super) trait Value: Copy {
    /// Its `cudnnBackendAttributeType_t`.
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
