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
            V h = T::load(s + at) * vexp2(loadu<V>(a + at) * (step * LOG2E)) + loadu<V>(b + i * n + j) * input;
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
      auto rows_of = [&](auto count, int64_t p) {   // their sums over lanes are taken together
        constexpr int R = decltype(count)::value;
        V y[16] = {};
        for (int r = 0; r < R; r++) {
          raw* row = s + (p + r) * n;
          const float input = step * x[p + r];
          for (int64_t j = 0; j < n; j += 16) {
            V v = T::load(row + j) * keep + loadu<V>(b + j) * input;
            y[r] += v * loadu<V>(c + j);
            T::store(row + j, v);
          }
        }
        float* to = out + (i * heads + h) * width + p;
        if constexpr (R == 16) storeu(to, sums(y) + loadu<V>(x + p) * d[h]);
        else *to = sum(y[0]) + d[h] * x[p];
      };
      int64_t p = 0;
      for (; p + 16 <= width; p += 16) rows_of(std::integral_constant<int, 16>{}, p);
      for (; p < width; p++) rows_of(std::integral_constant<int, 1>{}, p);
    }
}

// Gated delta rule; g is one log decay a head (per_channel 0) or one a key channel (1). With the decayed state
// D = S * e^g both sums over a row, D k and D q, are taken in one pass, because S' q = D q + change * (k q).
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
      float *kn = scratch.data(), *keep = kn + dk, *keep_k = keep + dk, *keep_q = keep_k + dk;
      V q2 = {}, k2 = {}, qk = {};
      for (int64_t j = 0; j < dk; j += 16) {
        V a = loadu<V>(q + j), b = loadu<V>(k + j); q2 += a * a; k2 += b * b; qk += a * b;
      }
      const float qs = 1.0f / std::sqrt(sum(q2) + 1e-6f) / std::sqrt((float)dk);
      const float ks = 1.0f / std::sqrt(sum(k2) + 1e-6f), product = sum(qk) * qs * ks;
      for (int64_t j = 0; j < dk; j += 16) {
        V decay = vexp(per_channel ? loadu<V>(g + (i * heads + h) * dk + j) : splat(g[i * heads + h]));
        V unit = loadu<V>(k + j) * ks;
        storeu(kn + j, unit); storeu(keep + j, decay);
        storeu(keep_k + j, decay * unit); storeu(keep_q + j, decay * (loadu<V>(q + j) * qs));
      }
      const float b = beta[i * heads + h];
      auto rows_of = [&](auto count, int64_t p) {
        constexpr int R = decltype(count)::value;
        raw* row[4];
        for (int r = 0; r < 4; r++) row[r] = s + (p + std::min(r, R - 1)) * dk;
        V dots[4] = {}, ys[4] = {};
        for (int64_t j = 0; j < dk; j += 16) {
          const V kj = loadu<V>(keep_k + j), qj = loadu<V>(keep_q + j);
          for (int r = 0; r < R; r++) { V x = T::load(row[r] + j); dots[r] += x * kj; ys[r] += x * qj; }
        }
        const V both = fold<20>(quarter_sums(dots[0], dots[1], dots[2], dots[3]), quarter_sums(ys[0], ys[1], ys[2], ys[3]));
        float total[16]; storeu(total, fold<10>(both, both));   // four sums with k, four with q
        V change[R];
        for (int r = 0; r < R; r++) {
          const float by = b * (v[p + r] - total[r]);
          out[(i * heads + h) * dv + p + r] = total[4 + r] + by * product;
          change[r] = splat(by);
        }
        for (int64_t j = 0; j < dk; j += 16) {
          const V keep_j = loadu<V>(keep + j), kj = loadu<V>(kn + j);
          for (int r = 0; r < R; r++) T::store(row[r] + j, T::load(row[r] + j) * keep_j + kj * change[r]);
        }
      };
      int64_t p = 0;
      for (; p + 4 <= dv; p += 4) rows_of(std::integral_constant<int, 4>{}, p);
      for (; p < dv; p++) rows_of(std::integral_constant<int, 1>{}, p);
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
