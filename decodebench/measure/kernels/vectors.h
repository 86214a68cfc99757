// Vectors of 16 floats on any processor (GCC and Clang vector extensions), and the element types of caches.
//
// No -ffast-math anywhere: a NaN in the cache must reach the output, that is how the tests see a read of a
// byte that nobody was to read.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#else
static inline int omp_get_max_threads() { return 1; }
#endif

typedef float V __attribute__((vector_size(64)));        // 16 lanes
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint16_t VH __attribute__((vector_size(32)));
typedef uint16_t VW __attribute__((vector_size(64)));
typedef uint8_t VB __attribute__((vector_size(16)));

static inline V splat(float x) { return V{} + x; }
// unaligned access by a type that says so: GCC splits a memcpy of 64 bytes in two and stalls on it
template <class T> struct Unaligned { typedef T type __attribute__((aligned(1), may_alias)); };
template <class T> static inline T loadu(const void* p) { return *(const typename Unaligned<T>::type*)p; }
template <class T> static inline void storeu(void* p, T v) { *(typename Unaligned<T>::type*)p = v; }
static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

static inline float sum(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[16]; memcpy(s, &v, sizeof v);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) s[i] += s[i + w];
  return s[0];
#endif
}
static inline float top_of(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float s[16]; memcpy(s, &v, sizeof v);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
  return s[0];
#endif
}

#if defined(__clang__)
#define SHUFFLE(a_, b_, ...) __builtin_shufflevector(a_, b_, __VA_ARGS__)
#else
#define SHUFFLE(a_, b_, ...) __builtin_shuffle(a_, b_, VI{__VA_ARGS__})
#endif
// the sums of 16 vectors at once, lane i of the result being the sum of v[i]
template <int M> static inline V shuffle_pair(V a, V b);
#define PAIR(m_, ...) template <> inline V shuffle_pair<m_>(V a, V b) { return SHUFFLE(a, b, __VA_ARGS__); }
PAIR(80, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
PAIR(81, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
PAIR(40, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
PAIR(41, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
PAIR(20, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
PAIR(21, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31)
PAIR(10, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
PAIR(11, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
template <int W> static inline V fold(V a, V b) { return shuffle_pair<W>(a, b) + shuffle_pair<W + 1>(a, b); }
static inline V sums(const V* v) {
  V a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) a[i] = fold<80>(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < 4; i++) b[i] = fold<40>(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 2; i++) c[i] = fold<20>(b[2 * i], b[2 * i + 1]);
  return fold<10>(c[0], c[1]);
}
// the sums of 4 vectors: lanes 4 * i to 4 * i + 3 of the result add up to the sum of v[i]
static inline V quarter_sums(V a, V b, V c, V d) { return fold<40>(fold<80>(a, b), fold<80>(c, d)); }

// 2^x for any x up to 127, relative error 2e-7, exact at whole numbers; NaN stays NaN, far below -126 it is 0.
static inline V vexp2(V x) {
#if defined(__AVX512DQ__)
  V r = (V)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);   // x - floor(x)
  V p = splat(1.877576e-3f);
  p = p * r + 8.98934156e-3f; p = p * r + 5.58263175e-2f; p = p * r + 2.40153611e-1f;
  p = p * r + 6.93153083e-1f; p = p * r + 1.0f;   // exactly 1 at 0
  return (V)_mm512_scalef_ps((__m512)p, (__m512)x);   // p * 2^floor(x)
#else
  x = x < splat(-126.0f) ? splat(-126.0f) : x;   // the comparison is written so that NaN stays
  V t = x + 12582912.0f;                          // round to the nearest integer in the low mantissa bits
  V n = t - 12582912.0f, r = x - n;
  V p = splat(1.32764666e-3f);
  p = p * r + 9.67554096e-3f; p = p * r + 5.55071346e-2f; p = p * r + 2.40221202e-1f;
  p = p * r + 6.93146944e-1f; p = p * r + 1.0f;
  VI scale = (__builtin_convertvector(n == n ? n : V{}, VI) + 127) << 23;
  return p * (V)scale;
#endif
}
static const float LOG2E = 1.44269504088896f;
// e^x; what the rounding of the product with log2(e) loses is put back, so the error does not grow with x
static inline V vexp(V x) {
  V t = x * LOG2E;
#if defined(__AVX512F__)
  V lost = (V)_mm512_fmsub_ps((__m512)x, (__m512)splat(LOG2E), (__m512)t) + x * 1.925963033e-8f;
  return vexp2(t) * (1.0f + lost * 0.693147181f);
#else
  return vexp2(t);
#endif
}

// float16 by its bits
#if defined(__AVX512F__)
static inline V widen(VH h) { return (V)_mm512_cvtph_ps((__m256i)h); }
static inline VH narrow(V v) {
  return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
static inline V widen(VH h) {
  __m128i half[2]; memcpy(half, &h, sizeof h);
  __m256 wide[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
  V v; memcpy(&v, wide, sizeof v);
  return v;
}
static inline VH narrow(V v) {
  __m256 wide[2]; memcpy(wide, &v, sizeof v);
  __m128i half[2];
  for (int i = 0; i < 2; i++) half[i] = _mm256_cvtps_ph(wide[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  VH h; memcpy(&h, half, sizeof h);
  return h;
}
#else
typedef _Float16 VF16 __attribute__((vector_size(32)));
static inline V widen(VH h) { return __builtin_convertvector((VF16)h, V); }
static inline VH narrow(V v) { return (VH)__builtin_convertvector(v, VF16); }
#endif

// --- element types: load 16 values as float, store 16 floats -----------------------------------
struct F32 { typedef float raw;
  static V load(const raw* p) { return loadu<V>(p); }
  static void store(raw* p, V v) { storeu(p, v); } };
struct BF16 { typedef uint16_t raw;
  static V load(const raw* p) { return (V)(__builtin_convertvector(loadu<VH>(p), VI) << 16); }
  static VH rounded(V v) {                     // round to nearest even; NaN keeps a mantissa bit
#if defined(__AVX512BF16__)                     // one instruction for the ten below; denormals become 0
    return (VH)_mm512_cvtneps_pbh((__m512)v);
#else
    VI b = (VI)v, r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    r = (v == v) ? r : ((b >> 16) | 0x40);
    return __builtin_convertvector(r, VH);
#endif
  }
  static void store(raw* p, V v) { storeu(p, rounded(v)); } };
struct F16 { typedef uint16_t raw;
  static V load(const raw* p) { return widen(loadu<VH>(p)); }
  static void store(raw* p, V v) { storeu(p, narrow(v)); } };
struct E5M2 { typedef uint8_t raw;            // the upper byte of a float16
  static V load(const raw* p) {
    return widen(__builtin_convertvector(loadu<VB>(p), VH) << 8); } };
struct E4M3 { typedef uint8_t raw;            // a float16 with its exponent 8 too small
  static V load(const raw* p) {
    VH b = __builtin_convertvector(loadu<VB>(p), VH);
    VH h = ((b & 0x80) << 8) | ((b & 0x7f) << 7);
    VI magnitude = __builtin_convertvector(b, VI) & 0x7f;
    return (magnitude == 0x7f) ? splat(NAN) : widen(h) * 256.0f; } };
template <class T> static const bool is_fp8 = sizeof(typename T::raw) == 1;
