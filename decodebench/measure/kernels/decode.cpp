// Decode kernels for the CPU: paged attention of one query token, and recurrent state updates.
//
// Plain C entry points, called through ctypes; compiled once by the system's C++ compiler. All
// arithmetic is float32, caches are float32, bfloat16, float16, float8 e4m3 or e5m2. Written with
// GCC/Clang vector extensions, so any SIMD width works. No -ffast-math: a NaN in the cache must reach
// the output, that is how the tests see a read of a byte that nobody was to read.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float V __attribute__((vector_size(64)));        // 16 lanes
typedef int32_t VI __attribute__((vector_size(64)));
typedef uint16_t VH __attribute__((vector_size(32)));
typedef uint8_t VB __attribute__((vector_size(16)));
typedef _Float16 VF16 __attribute__((vector_size(32)));

static inline V splat(float x) { return V{} + x; }
// unaligned access by a type that says so: GCC splits a memcpy of 64 bytes in two and stalls on it
template <class T> struct Unaligned { typedef T type __attribute__((aligned(1), may_alias)); };
template <class T> static inline T loadu(const void* p) { return *(const typename Unaligned<T>::type*)p; }
template <class T> static inline void storeu(void* p, T v) { *(typename Unaligned<T>::type*)p = v; }
static inline float sum(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[16]; memcpy(s, &v, sizeof v);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) s[i] += s[i + w];
  return s[0];
#endif
}

// the sums of 16 vectors at once, lane i of the result being the sum of v[i]
template <int M> static inline V shuffle_pair(V a, V b);
#if defined(__clang__)
#define SHUFFLE(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(...) __builtin_shuffle(a, b, VI{__VA_ARGS__})
#endif
#define PAIR(m_, ...) template <> inline V shuffle_pair<m_>(V a, V b) { return SHUFFLE(__VA_ARGS__); }
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
static inline float top_of(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float s[16]; memcpy(s, &v, sizeof v);
  for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
  return s[0];
#endif
}

// exp for x <= 88, relative error 2e-7; NaN stays NaN (the comparisons are written so).
static inline V vexp(V x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  V t = x * 1.44269504f + 12582912.0f;          // round to the nearest integer in the low mantissa bits
  V n = t - 12582912.0f;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (V)_mm512_scalef_ps((__m512)p, (__m512)n);   // p * 2^n
#else
  VI scale = (__builtin_convertvector(n == n ? n : V{}, VI) + 127) << 23;
  return p * (V)scale;
#endif
}

// float16 by its bits; without the instructions, by the compiler's own conversion
#if defined(__AVX512F__)
static inline V widen(VH h) { return (V)_mm512_cvtph_ps((__m256i)h); }
static inline VH narrow(V v) {
  return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
static inline V widen(VH h) { return __builtin_convertvector((VF16)h, V); }
static inline VH narrow(V v) { return (VH)__builtin_convertvector(v, VF16); }
#endif

// --- element types: load 16 values as float, store 16 floats -----------------------------------
struct F32 { typedef float raw;
  static V load(const raw* p) { return loadu<V>(p); }
  static void store(raw* p, V v) { storeu(p, v); } };
struct BF16 { typedef uint16_t raw;
  static V load(const raw* p) { return (V)(__builtin_convertvector(loadu<VH>(p), VI) << 16); }
  static void store(raw* p, V v) {            // round to nearest even; NaN keeps a mantissa bit
#if defined(__AVX512BF16__)                    // one instruction for the ten below; denormals become 0
    storeu(p, (VH)_mm512_cvtneps_pbh((__m512)v));
#else
    VI b = (VI)v, r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    r = (v == v) ? r : ((b >> 16) | 0x40);
    storeu(p, __builtin_convertvector(r, VH));
#endif
  } };
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

// --- attention -----------------------------------------------------------------------------------
struct Attention {
  const void* kv; int64_t block_stride, head_stride, entry_stride;  // in elements
  const int32_t* table; int64_t table_width;
  const int64_t *start, *stop;
  int64_t batch, kv_heads, group, entries, dk, dv, v_offset;
  const float* q;      // [batch, kv_heads * group, dk], scaled
  float* out;          // [batch, kv_heads * group, dv]
};

static const int64_t SERIAL = 1 << 17;   // elements that one thread moves before a second has woken up
static const int TILE = 32;   // tokens scored before their values are added; 64 evict what was fetched ahead

// scores[g][t] of G query rows and the tile's keys, four tokens at a time. `ahead` are the same rows of
// the next tile, fetched a line for a line read: in a burst they would wait for the memory, not hide it.
template <class T, int G>
static void score(const float* q, int64_t dk, const typename T::raw* const* rows,
                  const typename T::raw* const* ahead, int n, float* scores) {
  int t = 0;
  for (; t + 4 <= n; t += 4) {
    V acc[16] = {};
    for (int64_t d = 0; d < dk; d += 16) {
      V k0 = T::load(rows[t] + d), k1 = T::load(rows[t + 1] + d);
      V k2 = T::load(rows[t + 2] + d), k3 = T::load(rows[t + 3] + d);
      if (d * sizeof(*rows[0]) % 64 == 0) {
        __builtin_prefetch(ahead[t] + d, 0, 2); __builtin_prefetch(ahead[t + 1] + d, 0, 2);
        __builtin_prefetch(ahead[t + 2] + d, 0, 2); __builtin_prefetch(ahead[t + 3] + d, 0, 2);
      }
      for (int g = 0; g < G; g++) {
        V x = loadu<V>(q + g * dk + d);
        acc[4 * g] += x * k0; acc[4 * g + 1] += x * k1; acc[4 * g + 2] += x * k2; acc[4 * g + 3] += x * k3;
      }
    }
    float total[16]; storeu(total, sums(acc));
    for (int g = 0; g < G; g++) memcpy(scores + g * TILE + t, total + 4 * g, 4 * sizeof(float));
  }
  for (; t < n; t++) {
    V acc[G] = {};
    for (int64_t d = 0; d < dk; d += 16) {
      V k = T::load(rows[t] + d);
      for (int g = 0; g < G; g++) acc[g] += loadu<V>(q + g * dk + d) * k;
    }
    for (int g = 0; g < G; g++) scores[g * TILE + t] = sum(acc[g]);
  }
}

// acc[g] = acc[g] * keep[g] + sum over t of p[g][t] * values[t]
template <class T, int G>
static void add(float* acc, int64_t dv, const typename T::raw* const* rows,
                const typename T::raw* const* ahead, int n, const float* p, const float* keep) {
  int64_t d = 0;
  for (; d + 32 <= dv; d += 32) {
    V a[G][2];
    for (int g = 0; g < G; g++) {
      a[g][0] = loadu<V>(acc + g * dv + d) * keep[g]; a[g][1] = loadu<V>(acc + g * dv + d + 16) * keep[g];
    }
    for (int t = 0; t < n; t++) {
      V v0 = T::load(rows[t] + d), v1 = T::load(rows[t] + d + 16);
      __builtin_prefetch(ahead[t] + d, 0, 2);
      if (sizeof(*rows[0]) == 4) __builtin_prefetch(ahead[t] + d + 16, 0, 2);
      for (int g = 0; g < G; g++) { V x = splat(p[g * TILE + t]); a[g][0] += x * v0; a[g][1] += x * v1; }
    }
    for (int g = 0; g < G; g++) { storeu(acc + g * dv + d, a[g][0]); storeu(acc + g * dv + d + 16, a[g][1]); }
  }
  for (; d < dv; d += 16) {
    V a[G];
    for (int g = 0; g < G; g++) a[g] = loadu<V>(acc + g * dv + d) * keep[g];
    for (int t = 0; t < n; t++) {
      V v = T::load(rows[t] + d);
      for (int g = 0; g < G; g++) a[g] += splat(p[g * TILE + t]) * v;
    }
    for (int g = 0; g < G; g++) storeu(acc + g * dv + d, a[g]);
  }
}

template <class T, int G>
static void tile_rows(const Attention& a, const float* q, const typename T::raw* const* keys,
                      const typename T::raw* const* values, const typename T::raw* const* keys_ahead,
                      const typename T::raw* const* values_ahead, int n, float* acc, float* m, float* l) {
  float scores[G * TILE], keep[G];
  score<T, G>(q, a.dk, keys, keys_ahead, n, scores);
  for (int g = 0; g < G; g++) {
    float* s = scores + g * TILE;
    for (int t = n; t < TILE; t++) s[t] = -1e30f;
    V highest = splat(m[g]);   // a NaN score may be missed here; its exponential will not be
    for (int t = 0; t < TILE; t += 16) { V x = loadu<V>(s + t); highest = x > highest ? x : highest; }
    const float top = top_of(highest);
    keep[g] = m[g] == top ? 1.0f : vexp(splat(m[g] - top))[0];
    V total = {};
    for (int t = 0; t < TILE; t += 16) {
      V x = loadu<V>(s + t);
      V e = vexp(x - top);
      e = x == splat(-1e30f) ? V{} : e;
      total += e; storeu(s + t, e);
    }
    l[g] = l[g] * keep[g] + sum(total);
    m[g] = top;
  }
  add<T, G>(acc, a.dv, values, values_ahead, n, scores, keep);
}

// One piece [from, to) of one request for KV heads [h0, h1): unnormalised sums, maxima and totals.
template <class T>
static void piece(const Attention& a, int64_t i, int64_t from, int64_t to, int64_t h0, int64_t h1, float* acc,
                  float* m, float* l) {
  typedef typename T::raw raw;
  const raw *base[TILE], *next[TILE], *keys[TILE], *values[TILE], *keys_ahead[TILE], *values_ahead[TILE];
  const int64_t rows = (h1 - h0) * a.group;
  for (int64_t r = 0; r < rows; r++) { m[r] = -1e30f; l[r] = 0; }
  memset(acc, 0, rows * a.dv * sizeof(float));
  const int32_t* table = a.table + i * a.table_width;
  int64_t b = from / a.entries, e = from % a.entries;
  auto locate = [&](const raw** rows_of, int n) {
    for (int t = 0; t < n; t++) {
      rows_of[t] = (const raw*)a.kv + table[b] * a.block_stride + e * a.entry_stride;
      if (++e == a.entries) { e = 0; b++; }
    }
  };
  int n = (int)std::min<int64_t>(TILE, to - from);
  locate(base, n);
  for (int64_t p = from; p < to; p += TILE) {
    const int n_next = (int)std::max<int64_t>(0, std::min<int64_t>(TILE, to - p - TILE));
    locate(next, n_next);
    for (int64_t h = h0; h < h1; h++) {
      for (int t = 0; t < n; t++) {
        keys[t] = base[t] + h * a.head_stride; values[t] = keys[t] + a.v_offset;
        keys_ahead[t] = (t < n_next ? next[t] : base[t]) + h * a.head_stride;
        values_ahead[t] = keys_ahead[t] + a.v_offset;
      }
      int64_t g = 0;
      const float* q = a.q + (i * a.kv_heads + h) * a.group * a.dk;
      auto rows_of = [&](auto count) {   // as many query heads at a time as the registers hold
        constexpr int G = decltype(count)::value;
        for (; g + G <= a.group; g += G) {
          const int64_t r = (h - h0) * a.group + g;
          float* sums_of = acc + r * a.dv;
          tile_rows<T, G>(a, q + g * a.dk, keys, values, keys_ahead, values_ahead, n, sums_of, m + r, l + r);
        }
      };
      rows_of(std::integral_constant<int, 4>{});
      rows_of(std::integral_constant<int, 2>{});
      rows_of(std::integral_constant<int, 1>{});
    }
    std::copy(next, next + n_next, base);
    n = n_next;
  }
}

template <class T>
static void attend(const Attention& a) {
  // Token-major pages: a piece takes all heads, so memory is read in order. Head-major: one head each.
  const int64_t heads_each = a.head_stride < a.entry_stride ? a.kv_heads : 1;
  const int64_t head_parts = a.kv_heads / heads_each, rows = heads_each * a.group;
  int64_t tokens = 0;
  for (int64_t i = 0; i < a.batch; i++) tokens += std::max<int64_t>(0, a.stop[i] - a.start[i]);
  const int64_t want = 4 * omp_get_max_threads();
  int64_t split = std::max<int64_t>(256, (tokens * head_parts / want + TILE - 1) / TILE * TILE);
  struct Piece { int64_t i, from, to, h0; };
  std::vector<Piece> pieces;
  std::vector<int64_t> first(a.batch * head_parts + 1);
  for (int64_t i = 0; i < a.batch; i++)
    for (int64_t h = 0; h < head_parts; h++) {
      first[i * head_parts + h] = pieces.size();
      for (int64_t p = a.start[i]; p < a.stop[i]; p += split)
        pieces.push_back({i, p, std::min(p + split, a.stop[i]), h * heads_each});
    }
  first.back() = pieces.size();
  const int64_t count = pieces.size();
  std::vector<float> acc(count * rows * a.dv), m(count * rows), l(count * rows);
#pragma omp parallel for schedule(dynamic, 1) if (tokens * a.kv_heads * (a.dk + a.dv) > SERIAL)
  for (int64_t k = 0; k < count; k++) {
    const Piece& x = pieces[k];
    float* sums_of = &acc[k * rows * a.dv];
    piece<T>(a, x.i, x.from, x.to, x.h0, x.h0 + heads_each, sums_of, &m[k * rows], &l[k * rows]);
  }
  for (int64_t i = 0; i < a.batch; i++)
    for (int64_t h = 0; h < head_parts; h++)
      for (int64_t r = 0; r < rows; r++) {
        const int64_t k0 = first[i * head_parts + h], k1 = first[i * head_parts + h + 1];
        float* out = a.out + (i * a.kv_heads * a.group + h * rows + r) * a.dv;
        memset(out, 0, a.dv * sizeof(float));
        float top = -1e30f, total = 0;
        for (int64_t k = k0; k < k1; k++) top = m[k * rows + r] <= top ? top : m[k * rows + r];
        for (int64_t k = k0; k < k1; k++) {
          const float w = std::exp(m[k * rows + r] - top);
          total += w * l[k * rows + r];
          for (int64_t d = 0; d < a.dv; d++) out[d] += w * acc[(k * rows + r) * a.dv + d];
        }
        if (k1 > k0) for (int64_t d = 0; d < a.dv; d++) out[d] /= total;
      }
}

// dtype codes: 0 float32, 1 bfloat16, 2 float16, 3 float8_e4m3fn, 4 float8_e5m2
extern "C" int decode_attention(
    const void* kv, int dtype, int64_t block_stride, int64_t head_stride, int64_t entry_stride,
    const int32_t* table, int64_t table_width, const int64_t* start, const int64_t* stop, int64_t batch,
    int64_t kv_heads, int64_t group, int64_t entries, int64_t dk, int64_t dv, int64_t v_offset,
    const float* q, float* out) {
  Attention a{kv, block_stride, head_stride, entry_stride, table, table_width, start, stop, batch,
              kv_heads, group, entries, dk, dv, v_offset, q, out};
  switch (dtype) {
    case 0: attend<F32>(a); return 0;
    case 1: attend<BF16>(a); return 0;
    case 2: attend<F16>(a); return 0;
    case 3: attend<E4M3>(a); return 0;
    case 4: attend<E5M2>(a); return 0;
  }
  return 1;
}

// --- states --------------------------------------------------------------------------------------
// A convolution state is [state_len, channels] a row, oldest first; `stride` is elements between rows.
template <class T>
static void conv(void* state_, int64_t stride, const int64_t* rows, int64_t batch, int64_t length,
                 int64_t channels, const float* x, const float* weight, const float* bias, int64_t taps,
                 int silu, float* out) {
  typedef typename T::raw raw;
#pragma omp parallel for collapse(2) schedule(static) if (batch * channels * length > SERIAL)
  for (int64_t i = 0; i < batch; i++)
    for (int64_t c0 = 0; c0 < channels; c0 += 1024) {
      raw* s = (raw*)state_ + rows[i] * stride;
      for (int64_t c = c0; c < std::min(c0 + 1024, channels); c += 16) {
        V now = loadu<V>(x + i * channels + c);
        V y = loadu<V>(bias + c) + loadu<V>(weight + taps * channels + c) * now;
        for (int64_t j = 0; j < length; j++) {
          V old = T::load(s + j * channels + c);
          const int64_t tap = j - (length - taps);
          if (tap >= 0) y += loadu<V>(weight + tap * channels + c) * old;
          if (j) memmove(s + (j - 1) * channels + c, s + j * channels + c, 16 * sizeof(raw));
        }
        T::store(s + (length - 1) * channels + c, now);
        if (silu) y = y / (1.0f + vexp(-y));
        storeu(out + i * channels + c, y);
      }
    }
}

template <class T>
static void mamba1(void* state_, int64_t stride, const int64_t* rows, int64_t batch, int64_t channels,
                   int64_t n, const float* x, const float* dt, const float* a, const float* b, const float* c,
                   const float* d, float* out) {
  typedef typename T::raw raw;
#pragma omp parallel for collapse(2) schedule(static) if (batch * channels * n > SERIAL)
  for (int64_t c0 = 0; c0 < channels; c0 += 512)    // the batch inside: the decay table stays in the cache
    for (int64_t i = 0; i < batch; i++) {
      raw* s = (raw*)state_ + rows[i] * stride;
      for (int64_t k = c0; k < std::min(c0 + 512, channels); k += 16) {   // channels: a multiple of 16
        V y[16] = {};
        for (int c16 = 0; c16 < 16; c16++) {
          const float step = dt[i * channels + k + c16], input = step * x[i * channels + k + c16];
          for (int64_t j = 0; j < n; j += 16) {
            const int64_t at = (k + c16) * n + j;
            V h = T::load(s + at) * vexp(loadu<V>(a + at) * step) + loadu<V>(b + i * n + j) * input;
            y[c16] += h * loadu<V>(c + i * n + j);
            T::store(s + at, h);
          }
        }
        storeu(out + i * channels + k, sums(y) + loadu<V>(d + k) * loadu<V>(x + i * channels + k));
      }
    }
}

template <class T>
static void mamba2(void* state_, int64_t stride, const int64_t* rows, int64_t batch, int64_t heads,
                   int64_t width, int64_t n, int64_t groups, const float* xbc, const float* dt,
                   const float* a, const float* d, float* out) {
  typedef typename T::raw raw;
  const int64_t channels = heads * width + 2 * groups * n;
#pragma omp parallel for collapse(2) schedule(static) if (batch * heads * width * n > SERIAL)
  for (int64_t i = 0; i < batch; i++)
    for (int64_t h = 0; h < heads; h++) {
      raw* s = (raw*)state_ + rows[i] * stride + h * width * n;
      const float* x = xbc + i * channels + h * width;
      const float* b = xbc + i * channels + heads * width + h / (heads / groups) * n;
      const float* c = b + groups * n;
      const float step = dt[i * heads + h], keep = std::exp(step * a[h]);
      for (int64_t p = 0; p < width; p++) {
        const float input = step * x[p];
        V y = {};
        for (int64_t j = 0; j < n; j += 16) {
          V v = T::load(s + p * n + j) * keep + loadu<V>(b + j) * input;
          y += v * loadu<V>(c + j);
          T::store(s + p * n + j, v);
        }
        out[(i * heads + h) * width + p] = sum(y) + d[h] * x[p];
      }
    }
}

// Gated delta rule; g is one log decay a head (per_channel 0) or one a key channel (1).
template <class T>
static void delta(void* state_, int64_t stride, const int64_t* rows, int64_t batch, int64_t heads, int64_t dv,
                  int64_t dk, int64_t key_heads, const float* qkv, const float* g, const float* beta,
                  int per_channel, float* out) {
  typedef typename T::raw raw;
  const int64_t channels = 2 * key_heads * dk + heads * dv;
#pragma omp parallel for collapse(2) schedule(static) if (batch * heads * dv * dk > SERIAL)
  for (int64_t i = 0; i < batch; i++)
    for (int64_t h = 0; h < heads; h++) {
      raw* s = (raw*)state_ + rows[i] * stride + h * dv * dk;
      const int64_t hk = h / (heads / key_heads);
      const float* q = qkv + i * channels + hk * dk;
      const float* k = q + key_heads * dk;
      const float* v = qkv + i * channels + 2 * key_heads * dk + h * dv;
      std::vector<float> scratch(4 * dk);
      float *qn = scratch.data(), *kn = qn + dk, *keep = kn + dk, *row = keep + dk;
      V q2 = {}, k2 = {};
      for (int64_t j = 0; j < dk; j += 16) {
        V a = loadu<V>(q + j), b = loadu<V>(k + j); q2 += a * a; k2 += b * b;
      }
      const float qs = 1.0f / std::sqrt(sum(q2) + 1e-6f) / std::sqrt((float)dk);
      const float ks = 1.0f / std::sqrt(sum(k2) + 1e-6f);
      for (int64_t j = 0; j < dk; j += 16) {
        storeu(qn + j, loadu<V>(q + j) * qs); storeu(kn + j, loadu<V>(k + j) * ks);
        V decay = per_channel ? loadu<V>(g + (i * heads + h) * dk + j) : splat(g[i * heads + h]);
        storeu(keep + j, vexp(decay));
      }
      const float b = beta[i * heads + h];
      for (int64_t p = 0; p < dv; p++) {
        V dot = {}, y = {};
        for (int64_t j = 0; j < dk; j += 16) {
          V x = T::load(s + p * dk + j) * loadu<V>(keep + j);
          dot += x * loadu<V>(kn + j); storeu(row + j, x);
        }
        const float change = b * (v[p] - sum(dot));
        for (int64_t j = 0; j < dk; j += 16) {
          V x = loadu<V>(row + j) + loadu<V>(kn + j) * change;
          y += x * loadu<V>(qn + j);
          T::store(s + p * dk + j, x);
        }
        out[(i * heads + h) * dv + p] = sum(y);
      }
    }
}

#define BY_DTYPE(call_) \
  switch (dtype) { \
    case 0: { typedef F32 T; call_; return 0; } \
    case 1: { typedef BF16 T; call_; return 0; } \
    case 2: { typedef F16 T; call_; return 0; } \
  } \
  return 1;

extern "C" int decode_conv(void* state, int dtype, int64_t stride, const int64_t* rows, int64_t batch,
                           int64_t length, int64_t channels, const float* x, const float* weight,
                           const float* bias, int64_t taps, int silu, float* out) {
  BY_DTYPE(conv<T>(state, stride, rows, batch, length, channels, x, weight, bias, taps, silu, out))
}
extern "C" int decode_mamba1(void* state, int dtype, int64_t stride, const int64_t* rows, int64_t batch,
                             int64_t channels, int64_t n, const float* x, const float* dt, const float* a,
                             const float* b, const float* c, const float* d, float* out) {
  BY_DTYPE(mamba1<T>(state, stride, rows, batch, channels, n, x, dt, a, b, c, d, out))
}
extern "C" int decode_mamba2(void* state, int dtype, int64_t stride, const int64_t* rows, int64_t batch,
                             int64_t heads, int64_t width, int64_t n, int64_t groups, const float* xbc,
                             const float* dt, const float* a, const float* d, float* out) {
  BY_DTYPE(mamba2<T>(state, stride, rows, batch, heads, width, n, groups, xbc, dt, a, d, out))
}
extern "C" int decode_delta(void* state, int dtype, int64_t stride, const int64_t* rows, int64_t batch,
                            int64_t heads, int64_t dv, int64_t dk, int64_t key_heads, const float* qkv,
                            const float* g, const float* beta, int per_channel, float* out) {
  BY_DTYPE(delta<T>(state, stride, rows, batch, heads, dv, dk, key_heads, qkv, g, beta, per_channel, out))
}
