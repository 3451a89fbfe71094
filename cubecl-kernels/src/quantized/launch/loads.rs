use burn::tensor::DType;

use crate::quantized::kernels::Loads;

/// How floats of `dtype` are loaded in vectors of `lanes` numbers: what the kernels must know, the
/// type of a loaded element, and the elements of a vector.
pub(super) fn loads(dtype: DType, lanes: usize) -> (Loads, DType, usize) {
    let size = dtype.size();
    let bits = 8 * size;
    if lanes * size < 4 {
        let loads = Loads {
            per_element: 1,
            bits,
        };
        return (loads, dtype, lanes);
    }
    let per_element = 4 / size;
    (Loads { per_element, bits }, DType::U32, lanes / per_element)
}
