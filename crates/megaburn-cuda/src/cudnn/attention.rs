//! Attention and its gradients as graphs that cuDNN's engines support.
//!
//! An engine supports either a complete graph or nothing, and recognizes the graph by its form: the
//! sequence of operations, the transpositions and the types. The form used here is the one that
//! NVIDIA's open-source front end of cuDNN builds (`cudnn-frontend`, composite attention).

use burn::tensor::DType;

use super::{
    api::Api,
    graph::{Graph, Layout, Node, Number, Role},
    names::{DataType, Pointwise, Reduction},
};
use crate::error::CudaError;

/// The memory layout of a tensor `[s, b, h, d]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    /// The sizes `s`, `b`, `h` and `d`.
    pub sizes: [usize; 4],
    /// The distances between neighbours along `s`, `b`, `h` and `d`, in elements.
    pub strides: [usize; 4],
}

impl Heads {
    fn packed([s, b, h, d]: [usize; 4]) -> Self {
        Self {
            sizes: [s, b, h, d],
            strides: [b * h * d, h * d, d, 1],
        }
    }

    /// The layout in cuDNN's order of dimensions.
    fn layout(&self) -> Layout {
        let order = |[s, b, h, d]: [usize; 4]| [b, h, s, d].map(|x| x as i64);
        Layout {
            sizes: order(self.sizes),
            strides: order(self.strides),
        }
    }
}

/// Everything that determines an attention plan. Tensor addresses and the softmax scale are not
/// part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    pub(super) q: Heads,
    pub(super) k: Heads,
    pub(super) v: Heads,
    pub(super) dtype: DType,
    /// Whether query `i` sees only the keys up to `i`; otherwise it sees all.
    pub(super) causal: bool,
}

impl AttentionShape {
    /// Refuses, with a reason, inputs that cuDNN would read wrongly, because its engines do not
    /// check strides.
    pub(super) fn new([q, k, v]: [Heads; 3], dtype: DType, causal: bool) -> Result<Self, String> {
        if !matches!(dtype, DType::BF16 | DType::F16) {
            return Err(format!(
                "its elements are {}, not bf16 or f16",
                dtype.name()
            ));
        }
        let [s_q, b, hq, d] = q.sizes;
        let [s_k, _, hkv, d_v] = v.sizes;
        let fits = k.sizes == [s_k, b, hkv, d] && v.sizes[1] == b;
        if !fits || [s_q, s_k, b, hkv, d, d_v].contains(&0) || !hq.is_multiple_of(hkv) {
            return Err("the shapes of its operands do not match".into());
        }
        if [d, d_v].iter().any(|d| !d.is_multiple_of(8) || *d > 256) {
            return Err(format!(
                "head dimensions {d} and {d_v} must be multiples of 8, at most 256"
            ));
        }
        for heads in [&q, &k, &v] {
            let [between @ .., last] = heads.strides;
            let apart = |(stride, size): (&usize, &usize)| {
                stride.is_multiple_of(8) && (*stride > 0 || *size == 1)
            };
            if last != 1 || !between.iter().zip(&heads.sizes).all(apart) {
                return Err(format!(
                    "strides {:?} must be multiples of 8 elements (16 bytes), and the last one 1",
                    heads.strides
                ));
            }
        }
        Ok(Self {
            q,
            k,
            v,
            dtype,
            causal,
        })
    }

    /// The layout and element type of a tensor in device memory.
    pub(super) fn memory(&self, role: Role) -> (Layout, DataType) {
        let heads = |heads: Heads| (heads.layout(), self.elements());
        let [s_q, b, hq, d] = self.q.sizes;
        let of_rows = |width: usize| {
            (
                Layout::packed([b, hq, s_q, width].map(|x| x as i64)),
                DataType::F32,
            )
        };
        match role {
            Role::Queries => heads(self.q),
            Role::Keys => heads(self.k),
            Role::Values => heads(self.v),
            Role::Out | Role::OutGradient => heads(Heads::packed([s_q, b, hq, self.v.sizes[3]])),
            Role::QueriesGradient => heads(Heads::packed(self.q.sizes)),
            Role::KeysGradient => heads(Heads::packed(self.k.sizes)),
            Role::ValuesGradient => heads(Heads::packed(self.v.sizes)),
            Role::Lse | Role::Delta => of_rows(1),
            Role::QueriesSum => of_rows(d),
        }
    }

    fn elements(&self) -> DataType {
        if self.dtype == DType::BF16 {
            DataType::Bf16
        } else {
            DataType::F16
        }
    }

    fn scores(&self) -> Layout {
        self.rows(self.k.sizes[0] as i64)
    }

    /// The layout `[b, hq, s_q, width]`.
    fn rows(&self, width: i64) -> Layout {
        let [s_q, b, hq, _] = self.q.sizes.map(|x| x as i64);
        Layout::packed([b, hq, s_q, width])
    }

    fn is_grouped(&self) -> bool {
        self.q.sizes[2] != self.k.sizes[2]
    }

    fn outside(&self, graph: &mut Graph, role: Role) -> Result<Node, CudaError> {
        let (layout, dtype) = self.memory(role);
        graph.outside(role, layout, dtype)
    }

    fn outside_transposed(&self, graph: &mut Graph, role: Role) -> Result<Node, CudaError> {
        let (layout, dtype) = self.memory(role);
        graph.outside(role, layout.transposed(), dtype)
    }

    /// Applies the causal mask to `scores`: unseen keys get minus infinity.
    fn masked(&self, graph: &mut Graph, scores: Node) -> Result<Node, CudaError> {
        if !self.causal {
            return Ok(scores);
        }
        let query = graph.index(scores, 2)?;
        let key = graph.index(scores, 3)?;
        let seen = graph.between(scores.layout, DataType::Bool)?;
        let seen = graph.pointwise((Pointwise::AtLeast, DataType::Bool), &[query, key], seen)?;
        let unseen = graph.number(Number::Unseen)?;
        let into = graph.between(scores.layout, DataType::F32)?;
        graph.pointwise(
            (Pointwise::Select, DataType::F32),
            &[scores, unseen, seen],
            into,
        )
    }

    /// Builds `out = softmax(mask(q k^T * scale)) v` and the LSE.
    pub(super) fn forward(&self, api: &'static Api) -> Result<Graph, CudaError> {
        let mut graph = Graph::new(api);
        let g = &mut graph;
        let q = self.outside(g, Role::Queries)?;
        let kt = self.outside_transposed(g, Role::Keys)?;
        let scores = g.between(self.scores(), DataType::F32)?;
        let scores = g.multiply(q, kt, scores)?;
        let scale = g.number(Number::Scale)?;
        let scores = g.binary(Pointwise::Multiply, scores, scale)?;
        let scores = self.masked(g, scores)?;

        let top = g.between(self.rows(1), DataType::F32)?;
        let top = g.reduce(Reduction::Maximum, scores, top)?;
        let lowered = g.binary(Pointwise::Subtract, scores, top)?;
        let powers = g.unary(Pointwise::Exponential, lowered)?;
        let sum = g.between(self.rows(1), DataType::F32)?;
        let sum = g.reduce(Reduction::Sum, powers, sum)?;
        let logarithm = g.unary(Pointwise::Logarithm, sum)?;
        let lse = self.outside(g, Role::Lse)?;
        g.pointwise((Pointwise::Add, DataType::F32), &[top, logarithm], lse)?;

        let p = g.between(self.scores(), self.elements())?;
        let p = g.pointwise((Pointwise::Divide, DataType::F32), &[powers, sum], p)?;
        let v = self.outside(g, Role::Values)?;
        let out = self.outside(g, Role::Out)?;
        g.multiply(p, v, out)?;
        Ok(graph)
    }

    /// Builds the gradients of queries, keys and values. The probabilities are recomputed from the
    /// scores and the LSE.
    pub(super) fn backward(&self, api: &'static Api) -> Result<Graph, CudaError> {
        let mut graph = Graph::new(api);
        let g = &mut graph;
        let elements = self.elements();
        let q = self.outside(g, Role::Queries)?;
        let kt = self.outside_transposed(g, Role::Keys)?;
        let vt = self.outside_transposed(g, Role::Values)?;
        let out = self.outside(g, Role::Out)?;
        let dout = self.outside(g, Role::OutGradient)?;
        let lse = self.outside(g, Role::Lse)?;
        let scale = g.number(Number::Scale)?;
        let one = g.number(Number::One)?;

        let products = g.between(self.rows(self.v.sizes[3] as i64), DataType::F32)?;
        let products = g.pointwise((Pointwise::Multiply, DataType::F32), &[dout, out], products)?;
        let sums = g.between(self.rows(1), DataType::F32)?;
        let sums = g.reduce(Reduction::Sum, products, sums)?;
        let delta = self.outside(g, Role::Delta)?;
        let delta = g.pointwise((Pointwise::Multiply, DataType::F32), &[sums, one], delta)?;

        let scores = g.between(self.scores(), DataType::F32)?;
        let scores = g.multiply(q, kt, scores)?;
        let scores = g.binary(Pointwise::Multiply, scores, scale)?;
        let scores = g.binary(Pointwise::Subtract, scores, lse)?;
        let scores = self.masked(g, scores)?;
        let p = g.unary(Pointwise::Exponential, scores)?;
        let pt = g.view(p, self.scores().transposed(), elements)?;
        self.summed_over_groups(g, pt, dout, Role::ValuesGradient)?;

        let dp = g.between(self.scores(), DataType::F32)?;
        let dp = g.multiply(dout, vt, dp)?;
        let dp = g.binary(Pointwise::Subtract, dp, delta)?;
        let ds = g.binary(Pointwise::Multiply, dp, p)?;
        let ds = g.binary(Pointwise::Multiply, ds, scale)?;
        let dst = g.view(ds, self.scores().transposed(), elements)?;
        self.summed_over_groups(g, dst, q, Role::KeysGradient)?;

        let k = g.view(kt, kt.layout.transposed(), elements)?;
        let sum = self.outside(g, Role::QueriesSum)?;
        let sum = g.multiply(ds, k, sum)?;
        let dq = self.outside(g, Role::QueriesGradient)?;
        g.pointwise((Pointwise::Identity, DataType::F32), &[sum], dq)?;
        Ok(graph)
    }

    /// Multiplies `a b` and sums the result over the query heads that share a key/value head.
    fn summed_over_groups(
        &self,
        g: &mut Graph,
        a: Node,
        b: Node,
        role: Role,
    ) -> Result<(), CudaError> {
        let into = self.outside(g, role)?;
        if !self.is_grouped() {
            return g.multiply(a, b, into).map(drop);
        }
        let [b_, _, s_k, width] = into.layout.sizes;
        let of_all = Layout::packed([b_, self.q.sizes[2] as i64, s_k, width]);
        let of_all = g.between(of_all, self.elements())?;
        let of_all = g.multiply(a, b, of_all)?;
        g.reduce(Reduction::Sum, of_all, into).map(drop)
    }
}
