// What NVRTC's language has beyond C++, for a kernel that runs on fibers (see ../engine.hpp).
//
// `EMU_SITE` tells the places of a program apart: a barrier or shuffle is one place however often
// the compiler copies it.
#pragma once

#include "../engine.hpp"

using size_t = decltype(sizeof 0);
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __cluster_dims__(...)
#define EMU_SITE (__COUNTER__ + 1)

#define threadIdx emu_threadIdx
#define blockIdx emu_blockIdx
#define blockDim emu_blockDim
#define gridDim emu_gridDim
constexpr int warpSize = 32;

// ---- numbers ------------------------------------------------------------------------------------

template <class To, class From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, from);
}

inline float emu_from_bf16(unsigned short x) { return emu_bits<float>(unsigned(x) << 16); }

inline unsigned short emu_to_bf16(float x) {
    unsigned u = emu_bits<unsigned>(x);
    if (x != x) return 0x7fff;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

inline float emu_from_half(unsigned short x) {
    int exponent = (x >> 10) & 31;
    float mantissa = x & 1023, sign = x & 0x8000 ? -1.f : 1.f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    if (exponent == 0) return sign * mantissa * 0x1p-24f;
    return sign * __builtin_ldexpf(mantissa + 1024, exponent - 25);
}

inline unsigned short emu_to_half(float x) {
    unsigned u = emu_bits<unsigned>(x), sign = (u >> 16) & 0x8000;
    float size = __builtin_fabsf(x);
    if (x != x) return 0x7fff;
    if (size >= 65520.f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | unsigned(__builtin_nearbyintf(size * 0x1p24f));
    u &= 0x7fffffff;
    u += 0xfff + ((u >> 13) & 1);
    return sign | ((u - (112u << 23)) >> 13);
}

// The FP8 number with `MANTISSA` bits of mantissa that is nearest to `x`, as `cvt.rn.satfinite` rounds: e4m3 has
// 3 and e5m2 has 2.
template <int MANTISSA> inline unsigned emu_to_fp8(float x) {
    constexpr int SMALLEST = MANTISSA == 3 ? -6 : -14;
    constexpr unsigned LARGEST = MANTISSA == 3 ? 0x7e : 0x7b;
    unsigned sign = emu_bits<unsigned>(x) >> 24 & 0x80;
    float size = __builtin_fabsf(x);
    if (x != x) return 0x7f;
    if (size >= 65536.f) return sign | LARGEST;
    int exponent = int(emu_bits<unsigned>(size) >> 23) - 127;
    if (exponent < SMALLEST) exponent = SMALLEST;
    // In units of the last place; a carry goes into the exponent.
    unsigned units = __builtin_nearbyintf(__builtin_ldexpf(size, MANTISSA - exponent));
    unsigned bits = ((exponent - SMALLEST) << MANTISSA) + units;
    return sign | (bits < LARGEST ? bits : LARGEST);
}
template <int MANTISSA> inline unsigned emu_to_fp8x4(float a, float b, float c, float d) {
    return emu_to_fp8<MANTISSA>(a) | emu_to_fp8<MANTISSA>(b) << 8 | emu_to_fp8<MANTISSA>(c) << 16 |
           emu_to_fp8<MANTISSA>(d) << 24;
}

#define EMU_NARROW(NAME, TO, FROM)                                                                 \
    struct NAME {                                                                                  \
        unsigned short bits;                                                                       \
        NAME() = default;                                                                          \
        NAME(float x) : bits(TO(x)) {}                                                             \
        NAME(double x) : bits(TO(float(x))) {}                                                     \
        NAME(int x) : bits(TO(float(x))) {}                                                        \
        NAME(unsigned x) : bits(TO(float(x))) {}                                                   \
        NAME(long long x) : bits(TO(float(x))) {}                                                  \
        NAME(unsigned long long x) : bits(TO(float(x))) {}                                         \
        NAME(short x) : bits(TO(float(x))) {}                                                      \
        NAME(unsigned short x) : bits(TO(float(x))) {}                                             \
        NAME(bool x) : bits(TO(float(x))) {}                                                       \
        operator float() const { return FROM(bits); }                                              \
        NAME operator-() const { return NAME(-float(*this)); }                                     \
        NAME &operator+=(NAME o) { return *this = NAME(float(*this) + float(o)); }                 \
        NAME &operator-=(NAME o) { return *this = NAME(float(*this) - float(o)); }                 \
        NAME &operator*=(NAME o) { return *this = NAME(float(*this) * float(o)); }                 \
        NAME &operator/=(NAME o) { return *this = NAME(float(*this) / float(o)); }                 \
    };                                                                                             \
    inline NAME operator+(NAME a, NAME b) { return NAME(float(a) + float(b)); }                    \
    inline NAME operator-(NAME a, NAME b) { return NAME(float(a) - float(b)); }                    \
    inline NAME operator*(NAME a, NAME b) { return NAME(float(a) * float(b)); }                    \
    inline NAME operator/(NAME a, NAME b) { return NAME(float(a) / float(b)); }                    \
    inline bool operator<(NAME a, NAME b) { return float(a) < float(b); }                          \
    inline bool operator>(NAME a, NAME b) { return float(a) > float(b); }                          \
    inline bool operator<=(NAME a, NAME b) { return float(a) <= float(b); }                        \
    inline bool operator>=(NAME a, NAME b) { return float(a) >= float(b); }                        \
    inline bool operator==(NAME a, NAME b) { return float(a) == float(b); }                        \
    inline bool operator!=(NAME a, NAME b) { return float(a) != float(b); }                        \
    struct NAME##_pair {                                                                           \
        NAME x, y;                                                                                 \
        NAME##_pair() = default;                                                                   \
        NAME##_pair(NAME x, NAME y) : x(x), y(y) {}                                                \
    };                                                                                             \
    inline NAME##_pair operator+(NAME##_pair a, NAME##_pair b) { return {a.x + b.x, a.y + b.y}; }  \
    inline NAME##_pair operator-(NAME##_pair a, NAME##_pair b) { return {a.x - b.x, a.y - b.y}; }  \
    inline NAME##_pair operator*(NAME##_pair a, NAME##_pair b) { return {a.x * b.x, a.y * b.y}; }  \
    inline NAME##_pair operator/(NAME##_pair a, NAME##_pair b) { return {a.x / b.x, a.y / b.y}; }  \
    inline NAME##_pair operator-(NAME##_pair a) { return {-a.x, -a.y}; }

EMU_NARROW(__nv_bfloat16, emu_to_bf16, emu_from_bf16)
EMU_NARROW(__half, emu_to_half, emu_from_half)
using __nv_bfloat162 = __nv_bfloat16_pair;
using __half2 = __half_pair;

#define EMU_UNARY(NAME, BODY)                                                                      \
    inline __nv_bfloat16 h##NAME(__nv_bfloat16 a) { float x = a; return BODY; }                    \
    inline __half h##NAME(__half a) { float x = a; return BODY; }                                  \
    inline __nv_bfloat162 h2##NAME(__nv_bfloat162 a) { return {h##NAME(a.x), h##NAME(a.y)}; }      \
    inline __half2 h2##NAME(__half2 a) { return {h##NAME(a.x), h##NAME(a.y)}; }
EMU_UNARY(exp, __builtin_expf(x))
EMU_UNARY(exp2, __builtin_exp2f(x))
EMU_UNARY(log, __builtin_logf(x))
EMU_UNARY(log2, __builtin_log2f(x))
EMU_UNARY(sqrt, __builtin_sqrtf(x))
EMU_UNARY(rsqrt, 1.f / __builtin_sqrtf(x))
EMU_UNARY(rcp, 1.f / x)
EMU_UNARY(sin, __builtin_sinf(x))
EMU_UNARY(cos, __builtin_cosf(x))
EMU_UNARY(tanh, __builtin_tanhf(x))
EMU_UNARY(floor, __builtin_floorf(x))
EMU_UNARY(ceil, __builtin_ceilf(x))
EMU_UNARY(rint, __builtin_rintf(x))
EMU_UNARY(trunc, __builtin_truncf(x))

#define EMU_HALF_OPS(T)                                                                            \
    inline T __hmax(T a, T b) { return a != a ? b : b != b ? a : a > b ? a : b; }                  \
    inline T __hmin(T a, T b) { return a != a ? b : b != b ? a : a < b ? a : b; }                  \
    inline T __hmax_nan(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }              \
    inline T __hmin_nan(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }              \
    inline T __habs(T a) { return T(__builtin_fabsf(a)); }                                         \
    inline T __hfma(T a, T b, T c) { return T(__builtin_fmaf(a, b, c)); }                          \
    inline T##_pair __hmax2(T##_pair a, T##_pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; } \
    inline T##_pair __hmin2(T##_pair a, T##_pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; } \
    inline T##_pair __habs2(T##_pair a) { return {__habs(a.x), __habs(a.y)}; }                     \
    inline T##_pair __hfma2(T##_pair a, T##_pair b, T##_pair c) {                                  \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                                     \
    }
EMU_HALF_OPS(__nv_bfloat16)
EMU_HALF_OPS(__half)

inline float __expf(float x) { return __builtin_expf(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __log2f(float x) { return __builtin_log2f(x); }
inline float __log10f(float x) { return __builtin_log10f(x); }
inline float __powf(float x, float y) { return __builtin_powf(x, y); }
inline float __sinf(float x) { return __builtin_sinf(x); }
inline float __cosf(float x) { return __builtin_cosf(x); }
inline float __tanhf(float x) { return __builtin_tanhf(x); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.f / __builtin_sqrtf(x); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrt(float x) { return 1.f / __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
#define EMU_MATH1(NAME)                                                                            \
    inline float NAME(float x) { return __builtin_##NAME##f(x); }                                  \
    inline double NAME(double x) { return __builtin_##NAME(x); }
EMU_MATH1(exp) EMU_MATH1(exp2) EMU_MATH1(log) EMU_MATH1(log2) EMU_MATH1(log10) EMU_MATH1(log1p)
EMU_MATH1(expm1) EMU_MATH1(sqrt) EMU_MATH1(sin) EMU_MATH1(cos) EMU_MATH1(tan) EMU_MATH1(tanh)
EMU_MATH1(sinh) EMU_MATH1(cosh) EMU_MATH1(asin) EMU_MATH1(acos) EMU_MATH1(atan) EMU_MATH1(erf)
EMU_MATH1(floor) EMU_MATH1(ceil) EMU_MATH1(round) EMU_MATH1(rint) EMU_MATH1(trunc) EMU_MATH1(fabs)
#define EMU_MATH2(NAME)                                                                            \
    inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); }                      \
    inline double NAME(double x, double y) { return __builtin_##NAME(x, y); }
EMU_MATH2(pow) EMU_MATH2(fmod) EMU_MATH2(atan2) EMU_MATH2(hypot)
inline float erff(float x) { return __builtin_erff(x); }
inline float expf(float x) { return __builtin_expf(x); }
inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
#define EMU_ORDER(T)                                                                               \
    inline T max(T a, T b) { return a > b ? a : b; }                                               \
    inline T min(T a, T b) { return a < b ? a : b; }
EMU_ORDER(int) EMU_ORDER(unsigned) EMU_ORDER(long long) EMU_ORDER(unsigned long long)
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
inline int __mulhi(int a, int b) { return (long long)a * b >> 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

// ---- threads of a block and lanes of a warp -----------------------------------------------------

#define __syncthreads() emu_sync_block(EMU_SITE)
#define __syncwarp(...) emu_sync_warp(EMU_SITE, nullptr, nullptr, nullptr)
#define __threadfence()
#define __threadfence_block()
// Which lanes are here is found out when they meet.
#define __activemask() 0u

inline unsigned emu_lane() {
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

template <class T> struct EmuShuffle {
    T value;
    unsigned from;
};

template <class T> inline T emu_shuffle(unsigned site, T value, unsigned from) {
    EmuShuffle<T> in{value, from};
    T out = value;
    emu_sync_warp(site, &in, &out, [](unsigned lanes, const void **in, void **out) {
        for (unsigned lane = 0; lane < 32; lane++) {
            if (!(lanes >> lane & 1)) continue;
            auto wanted = static_cast<const EmuShuffle<T> *>(in[lane])->from;
            // What a lane that is not there would give is undefined: here it is its own value.
            if (wanted < 32 && lanes >> wanted & 1)
                *static_cast<T *>(out[lane]) =
                    static_cast<const EmuShuffle<T> *>(in[wanted])->value;
        }
    });
    return out;
}
#define __shfl_sync(mask, value, lane) emu_shuffle(EMU_SITE, value, unsigned(lane) % 32)
#define __shfl_xor_sync(mask, value, bits) emu_shuffle(EMU_SITE, value, emu_lane() ^ unsigned(bits))
#define __shfl_up_sync(mask, value, by) emu_shuffle(EMU_SITE, value, emu_lane() - unsigned(by))
#define __shfl_down_sync(mask, value, by) emu_shuffle(EMU_SITE, value, emu_lane() + unsigned(by))

struct EmuVotes {
    unsigned yes, lanes;
};
inline EmuVotes emu_vote(unsigned site, bool yes) {
    EmuVotes votes{};
    emu_sync_warp(site, &yes, &votes, [](unsigned lanes, const void **in, void **out) {
        unsigned yes = 0;
        for (unsigned lane = 0; lane < 32; lane++)
            if (lanes >> lane & 1 && *static_cast<const bool *>(in[lane])) yes |= 1u << lane;
        for (unsigned lane = 0; lane < 32; lane++)
            if (lanes >> lane & 1) *static_cast<EmuVotes *>(out[lane]) = {yes, lanes};
    });
    return votes;
}
inline bool emu_all(EmuVotes votes) { return votes.yes == votes.lanes; }
#define __ballot_sync(mask, yes) emu_vote(EMU_SITE, yes).yes
#define __any_sync(mask, yes) (emu_vote(EMU_SITE, yes).yes != 0)
#define __all_sync(mask, yes) emu_all(emu_vote(EMU_SITE, yes))

// ---- memory -------------------------------------------------------------------------------------

template <class T> inline unsigned __cvta_generic_to_shared(T *address) {
    return unsigned((const volatile char *)address - emu_shared());
}

template <class T> inline T emu_atomic(T *at, T with, T (*change)(T, T)) {
    T old = *at;
    *at = change(old, with);
    return old;
}
template <class T> inline T atomicAdd(T *at, T with) {
    return emu_atomic<T>(at, with, [](T a, T b) { return T(a + b); });
}
template <class T> inline T atomicExch(T *at, T with) {
    return emu_atomic<T>(at, with, [](T, T b) { return b; });
}
template <class T> inline T atomicMax(T *at, T with) {
    return emu_atomic<T>(at, with, [](T a, T b) { return a > b ? a : b; });
}
template <class T> inline T atomicMin(T *at, T with) {
    return emu_atomic<T>(at, with, [](T a, T b) { return a < b ? a : b; });
}

// ---- inline PTX, as `../nvrtc.cpp` writes it ----------------------------------------------------

// CubeCL passes a pointer to const where it updates what is there.
template <class T> inline void emu_ptx_atom_add(unsigned, T &old, const T *at, T with) {
    old = atomicAdd(const_cast<T *>(at), with);
}
template <class T> inline void emu_ptx_atom_max(unsigned, T &old, const T *at, T with) {
    old = atomicMax(const_cast<T *>(at), with);
}
inline void emu_ptx_max_nan(unsigned, float &out, float a, float b) {
    out = a != a ? a : b != b ? b : max(a, b);
}
inline void emu_ptx_min_nan(unsigned, float &out, float a, float b) {
    out = a != a ? a : b != b ? b : min(a, b);
}
inline void emu_ptx_ex2(unsigned, float &out, float a) { out = exp2f(a); }
inline void emu_ptx_tanh(unsigned, float &out, float a) { out = tanhf(a); }
inline void emu_ptx_rcp(unsigned, float &out, float a) { out = 1.f / a; }
inline void emu_ptx_elect(unsigned site, unsigned &out) {
    EmuVotes votes = emu_vote(site, true);
    out = emu_lane() == unsigned(__builtin_ctz(votes.lanes));
}
template <class S, class F>
inline void emu_ptx_copy(unsigned bytes, S to, F from, unsigned long long filled) {
    emu_copy_async(emu_shared() + unsigned(to), (const void *)(from), bytes, unsigned(filled));
}
template <class S, class F> inline void emu_ptx_copy(unsigned bytes, S to, F from) {
    emu_ptx_copy(bytes, to, from, bytes);
}

// Eight rows of eight 16-bit numbers a matrix; lane `8 n + r` passes the address of row `r` of the
// matrix `n`, and lane `4 r + c / 2` gets the elements `c` and `c + 1` of row `r` of each.
template <unsigned N, bool TRANSPOSED> struct EmuLdmatrix {
    static void work(unsigned lanes, const void **in, void **out) {
        if (lanes != ~0u) emu_fail("ldmatrix: lanes of the warp are missing");
        for (unsigned matrix = 0; matrix < N; matrix++) {
            const unsigned short *rows[8];
            for (unsigned row = 0; row < 8; row++) {
                unsigned at = *static_cast<const unsigned *>(in[8 * matrix + row]);
                if (at % 16) emu_fail("ldmatrix: a row is not aligned to 16 bytes");
                rows[row] = reinterpret_cast<const unsigned short *>(emu_shared() + at);
            }
            for (unsigned lane = 0; lane < 32; lane++) {
                unsigned row = lane / 4, column = 2 * (lane % 4);
                unsigned low = TRANSPOSED ? rows[column][row] : rows[row][column];
                unsigned high = TRANSPOSED ? rows[column + 1][row] : rows[row][column + 1];
                static_cast<unsigned *>(out[lane])[matrix] = low | high << 16;
            }
        }
    }
};
template <unsigned N, bool TRANSPOSED, class... Out>
inline void emu_ldmatrix(unsigned site, unsigned at, Out &...outs) {
    unsigned got[N];
    emu_sync_warp(site, &at, got, EmuLdmatrix<N, TRANSPOSED>::work);
    unsigned i = 0;
    ((outs = emu_bits<Out>(got[i++])), ...);
}

struct EmuStmatrix {
    unsigned at, values[4];
};
template <unsigned N, bool TRANSPOSED, class... In>
inline void emu_stmatrix(unsigned site, unsigned at, In... values) {
    EmuStmatrix in{at, {emu_bits<unsigned>(values)...}};
    emu_sync_warp(site, &in, nullptr, [](unsigned lanes, const void **in, void **) {
        if (lanes != ~0u) emu_fail("stmatrix: lanes of the warp are missing");
        auto of = [&](unsigned lane) { return static_cast<const EmuStmatrix *>(in[lane]); };
        for (unsigned matrix = 0; matrix < N; matrix++)
            for (unsigned lane = 0; lane < 32; lane++)
                for (unsigned half = 0; half < 2; half++) {
                    unsigned row = lane / 4, column = 2 * (lane % 4) + half;
                    if (TRANSPOSED) { unsigned swap = row; row = column; column = swap; }
                    auto to = emu_shared() + of(8 * matrix + row)->at;
                    reinterpret_cast<unsigned short *>(to)[column] =
                        of(lane)->values[matrix] >> (16 * half);
                }
    });
}

// D = A B + C of 16x16 and 16x8, as the PTX manual lays out m16n8k16.
struct EmuMma {
    unsigned a[4], b[2];
    float c[4];
};
template <float (*WIDE)(unsigned short)> struct EmuMmaWork {
    static void work(unsigned lanes, const void **in, void **out) {
        if (lanes != ~0u) emu_fail("mma: lanes of the warp are missing");
        float a[16][16], b[16][8];
        auto of = [&](unsigned lane) { return static_cast<const EmuMma *>(in[lane]); };
        for (unsigned lane = 0; lane < 32; lane++) {
            unsigned group = lane / 4, pair = 2 * (lane % 4);
            for (unsigned i = 0; i < 8; i++) {
                unsigned row = group + (i / 2 % 2) * 8, column = pair + i % 2 + (i / 4) * 8;
                a[row][column] = WIDE(of(lane)->a[i / 2] >> (16 * (i % 2)));
            }
            for (unsigned i = 0; i < 4; i++)
                b[pair + i % 2 + (i / 2) * 8][group] = WIDE(of(lane)->b[i / 2] >> (16 * (i % 2)));
        }
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < 4; i++) {
                unsigned row = lane / 4 + (i / 2) * 8, column = 2 * (lane % 4) + i % 2;
                float sum = of(lane)->c[i];
                for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
                static_cast<float *>(out[lane])[i] = sum;
            }
    }
};
template <float (*WIDE)(unsigned short), class... In>
inline void emu_mma(unsigned site, float &d0, float &d1, float &d2, float &d3, In... in) {
    unsigned words[10] = {emu_bits<unsigned>(in)...};
    EmuMma all;
    float d[4];
    for (unsigned i = 0; i < 4; i++) all.a[i] = words[i], all.c[i] = emu_bits<float>(words[6 + i]);
    all.b[0] = words[4], all.b[1] = words[5];
    emu_sync_warp(site, &all, d, EmuMmaWork<WIDE>::work);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

// A chain of products of 64 rows, 16 of them a warp's, with the columns of a tile in shared memory, as
// the PTX manual lays out m64nNk16 with a swizzle of 128 bytes.
struct EmuProduct {
    // Places of the result, of the left operand's words (or -1), of the descriptors in those below;
    // units that the descriptors are ahead; whether it adds to the result, and how the right one and the
    // left one lie.
    int result, words, left, left_ahead, right, right_ahead, adds, transposed, left_transposed = 0;
};
struct EmuWgmma {
    const EmuProduct *products;
    unsigned count, columns, num_sums;
    const float *sums;
    unsigned long long descriptors[4];
    const unsigned *words;
    unsigned warp = (threadIdx.x + blockDim.x * threadIdx.y) / 32;
};
template <float (*WIDE)(unsigned short)> struct EmuWgmmaWork {
    // The 16-bit number `x` bytes into row `row` of what a descriptor describes, `ahead` units on.
    static float at(unsigned long long described, int ahead, unsigned row, unsigned x) {
        if (described >> 62 != 1) emu_fail("wgmma: a swizzle other than of 128 bytes");
        unsigned start = ((described + ahead) & 0x3fff) * 16;
        unsigned panel = (described >> 16 & 0x3fff) * 16, rows = (described >> 32 & 0x3fff) * 16;
        unsigned linear = start + x / 128 * panel + row / 8 * rows + row % 8 * 128 + x % 128;
        return WIDE(*reinterpret_cast<const unsigned short *>(
            emu_shared() + (linear ^ (linear >> 3 & 0x70))));
    }
    static void work(unsigned lanes, const void **in, void **out) {
        if (lanes != ~0u) emu_fail("wgmma: lanes of the warp are missing");
        auto of = [&](unsigned lane) -> const EmuWgmma & {
            return *static_cast<const EmuWgmma *>(in[lane]);
        };
        const EmuWgmma &one = of(0);
        unsigned first = one.warp % 4 * 16;
        static thread_local float sums[16][512];
        auto place = [&](unsigned lane, unsigned i) -> float & {
            return sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + 2 * (lane % 4) + i % 2];
        };
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < one.num_sums; i++) place(lane, i) = of(lane).sums[i];
        for (unsigned step = 0; step < one.count; step++) {
            const EmuProduct &p = one.products[step];
            static thread_local float a[16][16], b[16][256];
            unsigned result = p.result / 4 * 8;
            for (unsigned k = 0; k < 16; k++)
                for (unsigned n = 0; n < one.columns; n++)
                    b[k][n] = p.transposed
                                  ? at(one.descriptors[p.right], p.right_ahead, k, 2 * n)
                                  : at(one.descriptors[p.right], p.right_ahead, n, 2 * k);
            for (unsigned row = 0; row < 16; row++)
                for (unsigned k = 0; k < 16; k++) {
                    if (p.words < 0) {
                        unsigned m = first + row, of_row = p.left_transposed ? k : m;
                        unsigned x = 2 * (p.left_transposed ? m : k);
                        a[row][k] = at(one.descriptors[p.left], p.left_ahead, of_row, x);
                        continue;
                    }
                    unsigned word = of(row % 8 * 4 + k % 8 / 2).words[p.words + row / 8 + 2 * (k / 8)];
                    a[row][k] = WIDE(word >> (16 * (k % 2)));
                }
            for (unsigned row = 0; row < 16; row++)
                for (unsigned n = 0; n < one.columns; n++) {
                    float sum = p.adds ? sums[row][result + n] : 0;
                    for (unsigned k = 0; k < 16; k++) sum += a[row][k] * b[k][n];
                    sums[row][result + n] = sum;
                }
        }
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < one.num_sums; i++)
                static_cast<float *>(out[lane])[i] = place(lane, i);
    }
};

// ---- how a kernel is called ---------------------------------------------------------------------

template <size_t...> struct EmuIndices {};

template <class... P, size_t... I>
inline void emu_apply(void (*kernel)(P...), void **arguments, EmuIndices<I...>) {
    kernel(*static_cast<P *>(arguments[I])...);
}
template <class... P> inline void emu_call(void (*kernel)(P...), void **arguments) {
    emu_apply(kernel, arguments, EmuIndices<__integer_pack(sizeof...(P))...>{});
}
