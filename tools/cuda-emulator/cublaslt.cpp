// libcublasLt: products of column-major matrices, one algorithm, sums in f32.
#include <dlfcn.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

enum Type { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };
constexpr int TF32 = 77, BIAS = 4, NOT_SUPPORTED = 15;
// What shares a factor in an FP8 matrix. The third kind is 5: blocks of 128 by 128.
constexpr int ONE_SCALE = 0, OF_NEIGHBORS = 4;

struct Layout {
    int type = 0;
    uint64_t rows = 0, cols = 0;
    int64_t ld = 0, stride = 0;
    int32_t batch = 1;
};

struct Desc {
    int compute = 0;
    int32_t transposed_a = 0, transposed_b = 0;
    int epilogue = 1;
    const void *bias = nullptr;
    int bias_type = F32;
    const float *scale_a = nullptr, *scale_b = nullptr;
    int32_t mode_a = ONE_SCALE, mode_b = ONE_SCALE;
    int8_t fast_accum = 0;
};

float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

bool is_fp8(int type) { return type == E4M3 || type == E5M2; }

float from_fp8(uint8_t x, int type) {
    int mantissa_bits = type == E4M3 ? 3 : 2, bias = type == E4M3 ? 7 : 15;
    int exponent = (x & 0x7f) >> mantissa_bits, mantissa = x & ((1 << mantissa_bits) - 1);
    float sign = x & 0x80 ? -1.f : 1.f;
    if (type == E4M3 && (x & 0x7f) == 0x7f) return __builtin_nanf("");
    if (type == E5M2 && exponent == 31)
        return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    if (exponent > 0) mantissa += 1 << mantissa_bits;
    else exponent = 1;
    return sign * __builtin_ldexpf(mantissa, exponent - bias - mantissa_bits);
}

float load(const void *at, int64_t i, int type) {
    if (type == F32) return static_cast<const float *>(at)[i];
    if (is_fp8(type)) return from_fp8(static_cast<const uint8_t *>(at)[i], type);
    uint16_t x = static_cast<const uint16_t *>(at)[i];
    if (type == BF16) return from_bits(uint32_t(x) << 16);
    uint32_t exponent = x >> 10 & 31, mantissa = x & 1023;
    float sign = x & 0x8000 ? -1.f : 1.f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    if (exponent == 0) return sign * mantissa * 0x1p-24f;
    return sign * __builtin_ldexpf(mantissa + 1024, int(exponent) - 25);
}

void store(void *at, int64_t i, int type, float x) {
    if (type == F32) {
        static_cast<float *>(at)[i] = x;
        return;
    }
    uint32_t u = to_bits(x), sign = u >> 16 & 0x8000, out;
    if (x != x) out = 0x7fff;
    else if (type == BF16) out = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    else if (__builtin_fabsf(x) >= 65520.f) out = sign | 0x7c00;
    else if (__builtin_fabsf(x) < 0x1p-14f)
        out = sign | uint32_t(__builtin_nearbyintf(__builtin_fabsf(x) * 0x1p24f));
    else {
        u &= 0x7fffffff;
        u += 0xfff + (u >> 13 & 1);
        out = sign | (u - (112u << 23)) >> 13;
    }
    static_cast<uint16_t *>(at)[i] = out;
}

float narrowed(float x, int compute) {
    return compute == TF32 ? from_bits((to_bits(x) + 0x1000) & ~0x1fffu) : x;
}

// The factor of element k of a column of an FP8 matrix, which is a row of what a caller multiplies.
float factor(const float *scales, int mode, const Layout *of, uint64_t col, uint64_t k) {
    if (mode == ONE_SCALE) return *scales;
    uint64_t blocks = (of->rows + 127) / 128;
    if (mode == OF_NEIGHBORS) return scales[k / 128 * of->cols + col];
    return scales[col / 128 * ((blocks + 3) / 4 * 4) + k / 128];
}

// Whether a Hopper GPU takes the scales of a product.
bool are_supported(const Desc *desc, const Layout *a, const Layout *b) {
    int mode_a = desc->mode_a, mode_b = desc->mode_b;
    if (!desc->scale_a || !desc->scale_b) return false;
    if (mode_a == ONE_SCALE && mode_b == ONE_SCALE) return true;
    if (mode_a == ONE_SCALE || mode_b == ONE_SCALE || desc->fast_accum) return false;
    auto aligned = [](const Layout *of, int mode) {
        return mode != OF_NEIGHBORS || of->cols % 4 == 0;
    };
    return aligned(a, mode_a) && aligned(b, mode_b) &&
           (mode_a == OF_NEIGHBORS || mode_b == OF_NEIGHBORS);
}

// Whether an Ada or Hopper GPU can compute a product: FP8 matrices only as "TN", with sizes and rows of
// multiples of 16 bytes, and not both as e5m2.
bool is_supported(const Desc *desc, const Layout *a, const Layout *b, const Layout *d) {
    if (!is_fp8(a->type) && !is_fp8(b->type)) return true;
    auto aligned = [](const Layout *of) {
        int bytes = is_fp8(of->type) ? 1 : of->type == F32 ? 4 : 2;
        return of->rows * bytes % 16 == 0 && of->ld * bytes % 16 == 0 && of->batch == 1;
    };
    return is_fp8(a->type) && is_fp8(b->type) && (a->type == E4M3 || b->type == E4M3) &&
           desc->transposed_a && !desc->transposed_b && aligned(a) && aligned(b) && aligned(d) &&
           a->cols % 16 == 0 && are_supported(desc, a, b);
}

bool is_supported_at(const Desc *desc, const void *a, const Layout *of_a, const void *b,
                     const Layout *of_b, const void *d, const Layout *of_d) {
    uintptr_t all = uintptr_t(a) | uintptr_t(b) | uintptr_t(d);
    return is_supported(desc, of_a, of_b, of_d) && (!is_fp8(of_a->type) || all % 16 == 0);
}

} // namespace

namespace {
// Copies from host memory that the driver has not done yet may be operands.
void settle() {
    static auto synchronize = reinterpret_cast<int (*)()>(
        dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "cuCtxSynchronize"));
    synchronize();
}
} // namespace

extern "C" {
int cublasLtCreate(void **handle) { return *handle = malloc(1), 0; }
int cublasLtDestroy(void *handle) { return free(handle), 0; }
size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulDescCreate(Desc **desc, int compute, int) {
    return *desc = new Desc{compute}, 0;
}
int cublasLtMatmulDescDestroy(Desc *desc) { return delete desc, 0; }
int cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t bytes) {
    switch (attribute) {
    case 3: return memcpy(&desc->transposed_a, value, bytes), 0;
    case 4: return memcpy(&desc->transposed_b, value, bytes), 0;
    case 7: return memcpy(&desc->epilogue, value, bytes), 0;
    case 8: return memcpy(&desc->bias, value, bytes), 0;
    case 17: return memcpy(&desc->scale_a, value, bytes), 0;
    case 18: return memcpy(&desc->scale_b, value, bytes), 0;
    case 25: return memcpy(&desc->fast_accum, value, bytes), 0;
    case 26: return memcpy(&desc->bias_type, value, bytes), 0;
    case 31: return memcpy(&desc->mode_a, value, bytes), 0;
    case 32: return memcpy(&desc->mode_b, value, bytes), 0;
    default: return NOT_SUPPORTED;
    }
}
int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t cols,
                               int64_t ld) {
    return *layout = new Layout{type, rows, cols, ld}, 0;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { return delete layout, 0; }
int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value,
                                     size_t bytes) {
    if (attribute == 5) memcpy(&layout->batch, value, bytes);
    if (attribute == 6) memcpy(&layout->stride, value, bytes);
    return 0;
}
int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = malloc(1), 0; }
int cublasLtMatmulPreferenceDestroy(void *preference) { return free(preference), 0; }
int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *, Desc *desc, Layout *a, Layout *b, Layout *, Layout *d,
                                   void *, int, void *results, int *count) {
    if (!is_supported(desc, a, b, d)) return *count = 0, NOT_SUPPORTED;
    // One algorithm without any data, its state success.
    memset(results, 0, 8 * 8 + 8 + 4 + 4 + 16);
    return *count = 1, 0;
}
int cublasLtMatmulAlgoCheck(void *, Desc *desc, Layout *a, Layout *b, Layout *, Layout *d,
                            const void *, void *result) {
    if (!is_supported(desc, a, b, d)) return NOT_SUPPORTED;
    memset(result, 0, 8 * 8 + 8 + 4 + 4 + 16);
    return 0;
}
int cublasLtMatmul(void *, Desc *desc, const float *alpha, const void *a, Layout *of_a,
                   const void *b, Layout *of_b, const float *beta, const void *c, Layout *of_c,
                   void *d, Layout *of_d, const void *, void *, size_t, void *) {
    if (!is_supported_at(desc, a, of_a, b, of_b, d, of_d)) return NOT_SUPPORTED;
    settle();
    uint64_t inner = desc->transposed_a ? of_a->rows : of_a->cols;
    for (int64_t batch = 0; batch < of_d->batch; batch++) {
        int64_t at_a = batch * of_a->stride, at_b = batch * of_b->stride, at = batch * of_d->stride;
        for (uint64_t col = 0; col < of_d->cols; col++)
            for (uint64_t row = 0; row < of_d->rows; row++) {
                float sum = 0;
                for (uint64_t k = 0; k < inner; k++) {
                    int64_t i = desc->transposed_a ? row * of_a->ld + k : k * of_a->ld + row;
                    int64_t j = desc->transposed_b ? k * of_b->ld + col : col * of_b->ld + k;
                    float term = narrowed(load(a, at_a + i, of_a->type), desc->compute) *
                                 narrowed(load(b, at_b + j, of_b->type), desc->compute);
                    if (is_fp8(of_a->type))
                        term *= factor(desc->scale_a, desc->mode_a, of_a, row, k) *
                                factor(desc->scale_b, desc->mode_b, of_b, col, k);
                    sum += term;
                }
                sum *= *alpha;
                int64_t i = col * of_d->ld + row;
                if (*beta != 0) sum += *beta * load(c, batch * of_c->stride + i, of_c->type);
                if (desc->epilogue == BIAS) sum += load(desc->bias, row, desc->bias_type);
                store(d, at + i, of_d->type, sum);
            }
    }
    return 0;
}
}
