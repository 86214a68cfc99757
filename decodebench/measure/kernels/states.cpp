// Recurrent state updates of one token on the CPU, in place, every state read and written once. Plain C entry
// points, called through ctypes. All arithmetic is float32; states are float32, bfloat16 or float16.

#include "vectors.h"

static const int64_t SERIAL = 1 << 17;   // elements that one thread moves before a second has woken up

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
