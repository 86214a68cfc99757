// Paged attention of one query token on the CPU. Plain C entry points, called through ctypes.
//
// Three ways, chosen by what the processor has and by the number of query heads that share a KV head:
//   few heads, float32: a vector runs along the head's dimensions, four tokens at a time;
//   few heads, pairs of bfloat16 (AVX512-BF16): a vector holds 8 dimensions of 4 heads, so that one
//     multiply serves all lanes and a score needs the sum of 4 lanes instead of 16;
//   many heads (latent attention): two matrix products with the heads as columns, keys and values first
//     brought side by side, float32 or pairs of bfloat16.
// Sums, maxima and exponentials are float32 throughout; in pairs, weights are rounded to bfloat16 before
// they meet the values, as every kernel that multiplies in bfloat16 does.

#include "vectors.h"

struct Attention {
  const void* kv; int64_t block_stride, head_stride, entry_stride;  // in elements
  const int32_t* table; int64_t table_width;
  const int64_t *start, *stop;
  int64_t batch, kv_heads, group, entries, dk, dv, v_offset;
  const float* q;      // [batch, kv_heads * group, dk]
  float factor;        // what scores are multiplied by: the scale times log2(e)
  float* out;          // [batch, kv_heads * group, dv]
};

static const int64_t SERIAL = 1 << 17;   // elements that one thread moves before a second has woken up
static const int TILE = 32;   // tokens scored before their values are added; 64 evict what was fetched ahead
static const int WIDE = 64;   // the same where many heads share what is fetched
static const float LOWEST = -1e30f;

template <class T> struct Tile {
  const typename T::raw *keys[WIDE], *values[WIDE], *keys_ahead[WIDE], *values_ahead[WIDE];
  int n;
};

// What one piece of a request has come to for some rows (query heads): sums of weighted values, the largest
// score in powers of two, the sum of weights.
struct Sums { float *acc, *m, *l; };

// --- few heads, float32 --------------------------------------------------------------------------
// scores[g][t] of G query rows and the tile's keys, four tokens at a time. `ahead` are the same rows of
// the next tile, fetched a line for a line read: in a burst they would wait for the memory, not hide it.
template <class T, int G>
static void score(const float* q, int64_t dk, const Tile<T>& tile, float* scores) {
  const auto *rows = tile.keys, *ahead = tile.keys_ahead;
  int t = 0;
  for (; t + 4 <= tile.n; t += 4) {
    V acc[16] = {};
    for (int64_t d = 0; d < dk; d += 16) {
      V k0 = T::load(rows[t] + d), k1 = T::load(rows[t + 1] + d);
      V k2 = T::load(rows[t + 2] + d), k3 = T::load(rows[t + 3] + d);
      if (d * sizeof(*rows[0]) % 64 == 0)
        for (int i = 0; i < 4; i++) fetch(ahead[t + i] + d);
      for (int g = 0; g < G; g++) {
        V x = loadu<V>(q + g * dk + d);
        acc[4 * g] += x * k0; acc[4 * g + 1] += x * k1; acc[4 * g + 2] += x * k2; acc[4 * g + 3] += x * k3;
      }
    }
    float total[16]; storeu(total, sums(acc));
    for (int g = 0; g < G; g++) memcpy(scores + g * TILE + t, total + 4 * g, 4 * sizeof(float));
  }
  for (; t < tile.n; t++) {
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
static void add(float* acc, int64_t dv, const Tile<T>& tile, const float* p, const float* keep) {
  const auto *rows = tile.values, *ahead = tile.values_ahead;
  int64_t d = 0;
  for (; d + 32 <= dv; d += 32) {
    V a[G][2];
    for (int g = 0; g < G; g++)
      for (int i = 0; i < 2; i++) a[g][i] = loadu<V>(acc + g * dv + d + 16 * i) * keep[g];
    for (int t = 0; t < tile.n; t++) {
      V v0 = T::load(rows[t] + d), v1 = T::load(rows[t] + d + 16);
      fetch(ahead[t] + d);
      if (sizeof(*rows[0]) == 4) fetch(ahead[t] + d + 16);
      for (int g = 0; g < G; g++) { V x = splat(p[g * TILE + t]); a[g][0] += x * v0; a[g][1] += x * v1; }
    }
    for (int g = 0; g < G; g++)
      for (int i = 0; i < 2; i++) storeu(acc + g * dv + d + 16 * i, a[g][i]);
  }
  for (; d < dv; d += 16) {
    V a[G];
    for (int g = 0; g < G; g++) a[g] = loadu<V>(acc + g * dv + d) * keep[g];
    for (int t = 0; t < tile.n; t++) {
      V v = T::load(rows[t] + d);
      for (int g = 0; g < G; g++) a[g] += splat(p[g * TILE + t]) * v;
    }
    for (int g = 0; g < G; g++) storeu(acc + g * dv + d, a[g]);
  }
}

template <class T, int G>
static void few_rows(const Attention& a, const float* q, const Tile<T>& tile, Sums s) {
  float scores[G * TILE], keep[G];
  score<T, G>(q, a.dk, tile, scores);
  for (int g = 0; g < G; g++) {
    float* x = scores + g * TILE;
    for (int t = tile.n; t < TILE; t++) x[t] = LOWEST / a.factor;
    V highest = splat(s.m[g]);   // a NaN score may be missed here; its exponential will not be
    for (int t = 0; t < TILE; t += 16) {
      V y = loadu<V>(x + t) * a.factor;
      storeu(x + t, y);
      highest = y > highest ? y : highest;
    }
    const float top = top_of(highest);
    keep[g] = s.m[g] == top ? 1.0f : vexp2(splat(s.m[g] - top))[0];
    V total = {};
    for (int t = 0; t < TILE; t += 16) {
      V y = loadu<V>(x + t);
      V e = y < splat(0.5f * LOWEST) ? V{} : vexp2(y - top);
      total += e; storeu(x + t, e);
    }
    s.l[g] = s.l[g] * keep[g] + sum(total);
    s.m[g] = top;
  }
  add<T, G>(s.acc, a.dv, tile, scores, keep);
}

// The few rows of one KV head, as many at a time as the registers hold.
template <class T> struct Few {
  static const int TOKENS = TILE;
  const Attention& a;
  explicit Few(const Attention& a_) : a(a_) {}
  int64_t acc_size() const { return a.group * a.dv; }
  int64_t rows() const { return a.group; }
  void start(const float*, Sums) {}
  void add_tile(const float* q, const Tile<T>& tile, Sums s) {
    int64_t g = 0;
    auto rows_of = [&](auto count) {
      constexpr int G = decltype(count)::value;
      for (; g + G <= a.group; g += G)
        few_rows<T, G>(a, q + g * a.dk, tile, {s.acc + g * a.dv, s.m + g, s.l + g});
    };
    rows_of(std::integral_constant<int, 4>{});
    rows_of(std::integral_constant<int, 2>{});
    rows_of(std::integral_constant<int, 1>{});
  }
  void finish(Sums) {}
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_PAIRS 1
#define DOT(acc_, a_, b_) ((V)_mm512_dpbf16_ps((__m512)(acc_), (__m512bh)(a_), (__m512bh)(b_)))

// 64 bytes of bfloat16 from 32 elements
template <class T> static inline __m512i pairs_of(const typename T::raw* p) {
  VH a = BF16::rounded(T::load(p)), b = BF16::rounded(T::load(p + 16));   // exact: fp8 and bf16 fit
  return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
}
template <> inline __m512i pairs_of<BF16>(const uint16_t* p) { return _mm512_loadu_si512(p); }
#if defined(__AVX512VBMI__)
// fp8 by a table of its 127 magnitudes, 64 elements at a time
template <class T> struct Fp8Table {
  __m512i low[2], high[2];
  Fp8Table() {
    uint8_t all[128], l[128], h[128];
    for (int i = 0; i < 128; i++) all[i] = i;
    for (int i = 0; i < 128; i += 16) {
      uint32_t bits[16]; storeu(bits, (VI)T::load(all + i));
      for (int j = 0; j < 16; j++) { l[i + j] = bits[j] >> 16; h[i + j] = bits[j] >> 24; }
    }
    for (int i = 0; i < 2; i++) { low[i] = loadu<__m512i>(l + 64 * i); high[i] = loadu<__m512i>(h + 64 * i); }
  }
  void widen64(const uint8_t* p, uint16_t* to) const {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
    const __m512i l = _mm512_permutex2var_epi8(low[0], x, low[1]);
    const __m512i h = _mm512_permutex2var_epi8(high[0], x, high[1]);
    // the sign bit of x over that of h: (x & 0x80) | h
    const __m512i s = _mm512_ternarylogic_epi64(x, _mm512_set1_epi8((char)0x80), h, 0xEA);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(l, s));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(l, s));
  }
};
#endif
template <class T> static inline void to_pairs(const typename T::raw* p, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512VBMI__)
  if constexpr (is_fp8<T>) {
    static const Fp8Table<T> table;
    for (; i + 64 <= n; i += 64) table.widen64(p + i, to + i);
  }
#endif
  for (; i + 32 <= n; i += 32) _mm512_storeu_si512(to + i, pairs_of<T>(p + i));
  for (; i < n; i += 16) BF16::store(to + i, T::load(p + i));
}

// --- few heads, pairs of bfloat16 ------------------------------------------------------------------
// Four heads are a quad; scores lie [4 tokens a vector][4 heads][token], so that maxima and exponentials of
// a quad are whole vectors. The last quad is filled with zero rows.
static inline V within(V x, int which) {   // lane order inside the four of each head: turned by 2, by 1
  return which == 2 ? (V)_mm512_permute_ps((__m512)x, 0x4E) : (V)_mm512_permute_ps((__m512)x, 0xB1);
}

template <class T> struct Quads {
  static const int TOKENS = TILE;
  const Attention& a;
  int64_t quads;
  std::vector<uint16_t> query, widened;   // [quads][dk / 8][4 heads][8]; fp8 rows as bfloat16
  V largest[4], total[4];
  explicit Quads(const Attention& a_) : a(a_), quads((a_.group + 3) / 4), query(quads * 4 * a_.dk) {
    if (is_fp8<T>) widened.resize(TILE * (a.dk + a.dv));
  }
  int64_t rows() const { return quads * 4; }
  int64_t acc_size() const { return rows() * a.dv; }

  void pack(const float* q) {
    std::fill(query.begin(), query.end(), 0);
    for (int64_t g = 0; g < a.group; g++)
      for (int64_t d = 0; d < a.dk; d += 16) {
        uint16_t row[16]; BF16::store(row, loadu<V>(q + g * a.dk + d));
        for (int64_t half = 0; half < 2; half++)
          memcpy(&query[((g / 4 * (a.dk / 8) + d / 8 + half) * 4 + g % 4) * 8], row + 8 * half, 16);
      }
  }

  // x[quad][t / 4]: scores of U quads from `quad` on
  template <int U> void score(int64_t quad, const uint16_t* const* keys, const Tile<T>& tile, bool ahead, V (*x)[TILE / 4]) {
    const int64_t chunks = a.dk / 8;
    const uint16_t* q = &query[quad * chunks * 32];
    constexpr int N = U == 1 ? 8 : 4;
    const int n = (tile.n + N - 1) / N * N;
    for (int t = 0; t < n; t += N) {
      V acc[U][N] = {};
      for (int64_t c = 0; c < chunks; c++) {
        V k[N];
        for (int i = 0; i < N; i++)
          k[i] = (V)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(keys[t + i] + 8 * c)));
        for (int u = 0; u < U; u++) {
          const V w = loadu<V>(q + (u * chunks + c) * 32);
          for (int i = 0; i < N; i++) acc[u][i] = DOT(acc[u][i], k[i], w);
        }
        if (ahead && c * 8 * sizeof(typename T::raw) % 64 == 0)
          for (int i = 0; i < N; i++) fetch(tile.keys_ahead[t + i] + 8 * c);
      }
      for (int u = 0; u < U; u++)
        for (int i = 0; i < N; i += 4) {
          const V s = (V)_mm512_unpacklo_ps((__m512)acc[u][i], (__m512)acc[u][i + 1]) +
                      (V)_mm512_unpackhi_ps((__m512)acc[u][i], (__m512)acc[u][i + 1]);
          const V r = (V)_mm512_unpacklo_ps((__m512)acc[u][i + 2], (__m512)acc[u][i + 3]) +
                      (V)_mm512_unpackhi_ps((__m512)acc[u][i + 2], (__m512)acc[u][i + 3]);
          x[u][(t + i) / 4] = (V)_mm512_shuffle_ps((__m512)s, (__m512)r, 0x44) +
                              (V)_mm512_shuffle_ps((__m512)s, (__m512)r, 0xEE);
        }
    }
  }

  // weights of a quad as pairs of tokens: p[t / 4][head][2 pairs]
  void weigh(int64_t quad, V* x, int n, uint16_t* p, float* keep, Sums s) {
    const int vectors = (n + 3) / 4;
    for (int i = 0; i < vectors; i++) x[i] *= a.factor;
    if (n % 4) {   // tokens that are not there
      const VI token = VI{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
      x[vectors - 1] = token < n % 4 ? x[vectors - 1] : splat(LOWEST);
    }
    V top = x[0];
    for (int i = 1; i < vectors; i++) top = x[i] > top ? x[i] : top;
    V other = within(top, 2); top = other > top ? other : top;
    other = within(top, 1); top = other > top ? other : top;
    const V before = loadu<V>(s.m + quad * 16);
    top = top > before ? top : before;
    V kept = vexp2(before - top), sum_of = loadu<V>(s.l + quad * 16) * kept;
    for (int i = 0; i < vectors; i++) {
      V e = x[i] == splat(LOWEST) ? V{} : vexp2(x[i] - top);
      sum_of += e;
      x[i] = e;
    }
    storeu(s.m + quad * 16, top); storeu(s.l + quad * 16, sum_of);
    for (int g = 0; g < 4; g++) keep[g] = kept[4 * g];
    for (int i = 0; i < vectors; i++) BF16::store(p + 16 * i, x[i]);
  }

  // acc[head][dv] = acc * keep + weights * values for H heads and N vectors of dimensions at a time. The
  // order of dimensions inside 32 is that of the interleaved rows of two tokens; finish() undoes it.
  template <int H, int N> void add(const uint16_t* const* values, const Tile<T>& tile, bool ahead, const uint16_t* const* p,
                                   const float* keep, float* acc, int64_t d) {
    V sum_of[H][N];
    for (int h = 0; h < H; h++)
      for (int i = 0; i < N; i++) sum_of[h][i] = loadu<V>(acc + h * a.dv + d + 16 * i) * keep[h];
    for (int t = 0; t < tile.n; t += 2) {
      const uint16_t *r0 = values[t] + d, *r1 = values[t + 1] + d;
      V v[N];
      for (int i = 0; i < N; i += 2) {
        const __m512i x = _mm512_loadu_si512(r0 + 16 * i), y = _mm512_loadu_si512(r1 + 16 * i);
        v[i] = (V)_mm512_unpacklo_epi16(x, y); v[i + 1] = (V)_mm512_unpackhi_epi16(x, y);
      }
      if (ahead)
        for (int i = 0; i < N; i += 2) { fetch(tile.values_ahead[t] + d + 16 * i); fetch(tile.values_ahead[t + 1] + d + 16 * i); }
      for (int h = 0; h < H; h++) {
        int32_t pair; memcpy(&pair, p[h / 4] + t / 4 * 16 + h % 4 * 4 + t % 4, 4);
        const V w = (V)(VI{} + pair);
        for (int i = 0; i < N; i++) sum_of[h][i] = DOT(sum_of[h][i], v[i], w);
      }
    }
    for (int h = 0; h < H; h++)
      for (int i = 0; i < N; i++) storeu(acc + h * a.dv + d + 16 * i, sum_of[h][i]);
  }

  void start(const float* q, Sums) { pack(q); }
  void add_tile(const float*, const Tile<T>& tile, Sums s) {
    const uint16_t *keys[TILE], *values[TILE];
    if constexpr (is_fp8<T>) {
      for (int t = 0; t < tile.n; t++) {
        uint16_t* row = &widened[t * (a.dk + a.dv)];
        to_pairs<T>(tile.keys[t], row, a.dk);
        to_pairs<T>(tile.values[t], row + a.dk, a.dv);
        keys[t] = row; values[t] = row + a.dk;
        for (int64_t d = 0; d < a.dk; d += 64) fetch(tile.keys_ahead[t] + d);
        for (int64_t d = 0; d < a.dv; d += 64) fetch(tile.values_ahead[t] + d);
      }
    } else {
      memcpy(keys, tile.keys, sizeof keys); memcpy(values, tile.values, sizeof values);
    }
    for (int t = tile.n; t < TILE && t < (tile.n + 7) / 8 * 8; t++) {   // read and not counted
      keys[t] = keys[tile.n - 1]; values[t] = values[tile.n - 1];
    }
    for (int64_t quad = 0; quad < quads; quad += 2) {
      V x[2][TILE / 4];
      alignas(64) uint16_t weights[2][TILE * 4];
      const uint16_t* p[2] = {weights[0], weights[1]};
      float keep[8];
      const bool both = quad + 1 < quads, ahead = !is_fp8<T> && quad == 0;
      if (both) score<2>(quad, keys, tile, ahead, x); else score<1>(quad, keys, tile, ahead, x);
      for (int u = 0; u <= both; u++) weigh(quad + u, x[u], tile.n, weights[u], keep + 4 * u, s);
      float* acc = s.acc + quad * 4 * a.dv;
      int64_t d = 0;
      if (both)
        for (; d + 32 <= a.dv; d += 32) add<8, 2>(values, tile, ahead, p, keep, acc, d);
      else {
        for (; d + 64 <= a.dv; d += 64) add<4, 4>(values, tile, ahead, p, keep, acc, d);
        for (; d + 32 <= a.dv; d += 32) add<4, 2>(values, tile, ahead, p, keep, acc, d);
      }
    }
  }
  // Sums of the quads to sums of rows, dimensions in their own order.
  void finish(Sums s) {
    for (int64_t r = 0; r < rows(); r++) {
      float* acc = s.acc + r * a.dv;
      for (int64_t d = 0; d < a.dv; d += 32) {
        float mixed[32]; memcpy(mixed, acc + d, sizeof mixed);
        for (int lane = 0; lane < 16; lane++)
          for (int half = 0; half < 2; half++) acc[d + lane / 4 * 8 + half * 4 + lane % 4] = mixed[half * 16 + lane];
      }
    }
    for (int64_t g = 0; g < rows(); g++) {   // in place: row g's four lanes lie behind those it overwrites
      const float* four = s.l + g * 4;
      const float total = four[0] + four[1] + four[2] + four[3], top = s.m[g * 4];
      s.l[g] = total; s.m[g] = top;
    }
  }
};
#endif

// --- many heads: matrix products ---------------------------------------------------------------------
// A dimension of Product is 32 bits wide: a float, or a pair of bfloat16 (two dimensions, or two tokens).
struct Floats {
  typedef float raw; static const int EACH = 1;
  static V multiply(V acc, V a, V b) { return acc + a * b; }
};
#if defined(HAS_PAIRS)
struct Pairs {
  typedef uint16_t raw; static const int EACH = 2;
  static V multiply(V acc, V a, V b) { return DOT(acc, a, b); }
};
#endif
#if defined(__AVX512F__)
static const int ACROSS = 4, DOWN = 6;   // accumulators that fill the registers: vectors across, rows down
#else
static const int ACROSS = 1, DOWN = 6;
#endif

// out[m][16 * n ...] = keep[m] * out + sum over k of a[m][k] * b[k][n], for M rows and N vectors
template <class P, int M, int N>
static inline void block_product(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t k,
                                 float* out, int64_t out_row, const float* keep) {
  V acc[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) acc[m][n] = keep ? loadu<V>(out + m * out_row + 16 * n) * keep[m] : V{};
  for (int64_t i = 0; i < k; i++) {
    V x[N];
    for (int n = 0; n < N; n++) x[n] = loadu<V>(b + i * b_step + 16 * n);
    for (int m = 0; m < M; m++) {
      int32_t bits; memcpy(&bits, a + m * a_row + i * a_step, 4);
      const V w = (V)(VI{} + bits);
      for (int n = 0; n < N; n++) acc[m][n] = P::multiply(acc[m][n], w, x[n]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) storeu(out + m * out_row + 16 * n, acc[m][n]);
}
template <class P, int N>
static void product(int64_t rows, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t k,
                    float* out, int64_t out_row, const float* keep) {
  int64_t m = 0;
  auto blocks = [&](auto count) {
    constexpr int M = decltype(count)::value;
    for (; m + M <= rows; m += M)
      block_product<P, M, N>(a + m * a_row, a_row, a_step, b, b_step, k, out + m * out_row, out_row, keep ? keep + m : nullptr);
  };
  if constexpr (N == 1 && ACROSS > 1) blocks(std::integral_constant<int, 16>{});
  if constexpr (N == 2 && ACROSS > 1) blocks(std::integral_constant<int, 10>{});
  blocks(std::integral_constant<int, DOWN>{});
  blocks(std::integral_constant<int, 4>{});
  blocks(std::integral_constant<int, 2>{});
  blocks(std::integral_constant<int, 1>{});
}

template <class T, class P> struct Many {
  static const int TOKENS = WIDE;
  typedef typename P::raw raw;
  const Attention& a;
  int64_t columns, width, steps;   // heads filled up to whole vectors; elements a row; products a score
  std::vector<raw> rows_of;        // [WIDE][width], width as in the cache
  std::vector<float> query, scores, values, keep;
  explicit Many(const Attention& a_) : a(a_), columns((a_.group + 15) / 16 * 16) {
    width = std::max(a.dk, a.v_offset + a.dv); steps = a.dk / P::EACH;
    rows_of.resize(WIDE * width + 64);
    query.resize(steps * columns); scores.resize(WIDE * columns); keep.resize(columns);
    if (P::EACH == 2) values.resize(WIDE / 2 * (a.dv + 16));
  }
  int64_t rows() const { return a.group; }
  int64_t acc_size() const { return a.group * a.dv; }
  template <class F> void across(int64_t vectors, F f) {   // f(first vector, how many)
    int64_t n = 0;
    for (; n + ACROSS <= vectors; n += ACROSS) f(n, std::integral_constant<int, ACROSS>{});
    if (ACROSS > 2) for (; n + 2 <= vectors; n += 2) f(n, std::integral_constant<int, ACROSS == 1 ? 1 : 2>{});
    for (; n < vectors; n++) f(n, std::integral_constant<int, 1>{});
  }

  // the heads as columns: [vectors across][step][vector][16]
  void start(const float* q, Sums) {
    std::fill(query.begin(), query.end(), 0.0f);
    across(columns / 16, [&](int64_t n, auto count) {
      constexpr int N = decltype(count)::value;
      raw* to = (raw*)(query.data() + n * 16 * steps);
      for (int64_t g = n * 16; g < std::min(a.group, (n + N) * 16); g++)
        for (int64_t d = 0; d < a.dk; d += 16) {
          raw row[16];
          if constexpr (P::EACH == 2) BF16::store(row, loadu<V>(q + g * a.dk + d));
          else memcpy(row, q + g * a.dk + d, sizeof row);
          for (int i = 0; i < 16; i++)
            to[((d + i) / P::EACH * N * 16 + (g - n * 16)) * P::EACH + (d + i) % P::EACH] = row[i];
        }
    });
  }
  void bring(const Tile<T>& tile) {
    for (int t = 0; t < tile.n; t++) {
      raw* row = &rows_of[t * width];
      if constexpr (P::EACH == 2) {
#if defined(HAS_PAIRS)
        to_pairs<T>(tile.keys[t], row, width);
#endif
      } else
        for (int64_t d = 0; d < width; d += 16) storeu(row + d, T::load(tile.keys[t] + d));
      for (int64_t d = 0; d < width; d += 64 / sizeof(typename T::raw)) fetch(tile.keys_ahead[t] + d);
    }
    if (P::EACH == 2 && tile.n % 2) std::copy_n(&rows_of[(tile.n - 1) * width], width, &rows_of[tile.n * width]);
  }
  void add_tile(const float*, const Tile<T>& tile, Sums s) {
    bring(tile);
    const int n = tile.n, even = P::EACH == 2 ? (n + 1) / 2 * 2 : n;
    across(columns / 16, [&](int64_t v, auto count) {
      constexpr int N = decltype(count)::value;
      product<P, N>(n, (const float*)rows_of.data(), width / P::EACH, 1, query.data() + v * 16 * steps, N * 16, steps,
                    scores.data() + v * 16, columns, nullptr);
    });
    for (int64_t c = 0; c < columns; c += 16) {
      float* x = scores.data() + c;
      const V before = loadu<V>(s.m + c);   // room for whole vectors: see `stat`
      V top = before;
      for (int t = 0; t < n; t++) {
        V y = loadu<V>(x + t * columns) * a.factor;
        storeu(x + t * columns, y);
        top = y > top ? y : top;
      }
      const V kept = vexp2(before - top);
      V total = {};
      for (int t = 0; t < n; t++) {
        V e = vexp2(loadu<V>(x + t * columns) - top);
        total += e; storeu(x + t * columns, e);
      }
      if (even > n) storeu(x + n * columns, V{});
      storeu(keep.data() + c, kept);
      storeu(s.l + c, loadu<V>(s.l + c) * kept + total); storeu(s.m + c, top);
    }
    if constexpr (P::EACH == 2) {
#if defined(HAS_PAIRS)
      // weights of two tokens side by side over those of the first: [pair][head]
      for (int t = 0; t < even; t += 2)
        for (int64_t c = 0; c < columns; c += 16) {
          VI one = __builtin_convertvector(BF16::rounded(loadu<V>(&scores[t * columns + c])), VI);
          VI two = __builtin_convertvector(BF16::rounded(loadu<V>(&scores[(t + 1) * columns + c])), VI);
          storeu(&scores[t / 2 * columns + c], one | (two << 16));
        }
      across(a.dv / 16, [&](int64_t v, auto count) {   // rows of two tokens interleaved, as in Quads
        constexpr int N = decltype(count)::value;
        float* to = values.data() + v * 16 * (WIDE / 2);
        for (int t = 0; t < even; t += 2) {
          const raw *r0 = &rows_of[t * width + a.v_offset + v * 16], *r1 = r0 + width;
          if constexpr (N > 1)   // dimensions come in whole 32
            for (int i = 0; i < N; i += 2) {
              const __m512i x = _mm512_loadu_si512(r0 + 16 * i), y = _mm512_loadu_si512(r1 + 16 * i);
              storeu(to + (t / 2 * N + i) * 16, (V)_mm512_unpacklo_epi16(x, y));
              storeu(to + (t / 2 * N + i + 1) * 16, (V)_mm512_unpackhi_epi16(x, y));
            }
        }
        product<P, N>(a.group, scores.data(), 1, columns, to, N * 16, even / 2, s.acc + v * 16, a.dv, keep.data());
      });
#endif
    } else
      across(a.dv / 16, [&](int64_t v, auto count) {
        constexpr int N = decltype(count)::value;
        product<P, N>(a.group, scores.data(), 1, columns, (const float*)rows_of.data() + a.v_offset + v * 16, width, n,
                      s.acc + v * 16, a.dv, keep.data());
      });
  }
  void finish(Sums s) {
    if (P::EACH == 1) return;
    for (int64_t g = 0; g < a.group; g++)
      for (int64_t d = 0; d + 32 <= a.dv; d += 32) {
        float* acc = s.acc + g * a.dv + d;
        float mixed[32]; memcpy(mixed, acc, sizeof mixed);
        for (int lane = 0; lane < 16; lane++)
          for (int half = 0; half < 2; half++) acc[lane / 4 * 8 + half * 4 + lane % 4] = mixed[half * 16 + lane];
      }
  }
};

// --- a request in pieces -----------------------------------------------------------------------------
// One piece [from, to) of request i for KV heads [h0, h1): unnormalised sums, maxima and totals.
template <class T, class Way>
static void piece(const Attention& a, Way* ways, int64_t i, int64_t from, int64_t to, int64_t h0, int64_t h1, float* acc, float* m,
                  float* l, int64_t stat) {
  typedef typename T::raw raw;
  const int N = Way::TOKENS;
  const raw *base[WIDE], *next[WIDE];
  Tile<T> tile;
  const int64_t heads = h1 - h0;
  std::fill(m, m + heads * stat, LOWEST);
  std::fill(l, l + heads * stat, 0.0f);
  memset(acc, 0, heads * ways[0].acc_size() * sizeof(float));
  auto sums_of = [&](int64_t h) { return Sums{acc + h * ways[0].acc_size(), m + h * stat, l + h * stat}; };
  auto q_of = [&](int64_t h) { return a.q + (i * a.kv_heads + h0 + h) * a.group * a.dk; };
  for (int64_t h = 0; h < heads; h++) ways[h].start(q_of(h), sums_of(h));
  const int32_t* table = a.table + i * a.table_width;
  int64_t b = from / a.entries, e = from % a.entries;
  auto locate = [&](const raw** rows_of, int n) {
    for (int t = 0; t < n; t++) {
      rows_of[t] = (const raw*)a.kv + table[b] * a.block_stride + e * a.entry_stride;
      if (++e == a.entries) { e = 0; b++; }
    }
  };
  int n = (int)std::min<int64_t>(N, to - from);
  locate(base, n);
  for (int64_t p = from; p < to; p += N) {
    const int n_next = (int)std::max<int64_t>(0, std::min<int64_t>(N, to - p - N));
    locate(next, n_next);
    for (int64_t h = 0; h < heads; h++) {
      for (int t = 0; t < N; t++) {
        const raw* row = base[std::min(t, n - 1)];
        tile.keys[t] = row + (h0 + h) * a.head_stride; tile.values[t] = tile.keys[t] + a.v_offset;
        tile.keys_ahead[t] = (t < n_next ? next[t] : row) + (h0 + h) * a.head_stride;
        tile.values_ahead[t] = tile.keys_ahead[t] + a.v_offset;
      }
      tile.n = n;
      ways[h].add_tile(q_of(h), tile, sums_of(h));
    }
    std::copy(next, next + n_next, base);
    n = n_next;
  }
  for (int64_t h = 0; h < heads; h++) ways[h].finish(sums_of(h));
}

template <class T, class Way> static void attend(const Attention& a) {
  // Token-major pages: a piece takes all heads, so memory is read in order. Head-major: one head each.
  const int64_t heads_each = a.head_stride < a.entry_stride ? a.kv_heads : 1;
  const int64_t head_parts = a.kv_heads / heads_each;
  int64_t tokens = 0;
  for (int64_t i = 0; i < a.batch; i++) tokens += std::max<int64_t>(0, a.stop[i] - a.start[i]);
  const int64_t want = 4 * omp_get_max_threads(), N = Way::TOKENS;
  const int64_t split = std::max<int64_t>(256, (tokens * head_parts / want + N - 1) / N * N);
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
  const Way shape(a);
  const int64_t stat = shape.rows() * 4;   // maxima and totals of a KV head: room for four lanes a row
  const int64_t acc_each = heads_each * shape.acc_size(), stat_each = heads_each * stat;
  // kept between steps: memory that is new costs a page fault every 4 KiB
  static thread_local std::vector<float> kept;
  if ((int64_t)kept.size() < count * (acc_each + 2 * stat_each)) kept.resize(count * (acc_each + 2 * stat_each));
  float *acc = kept.data(), *m = acc + count * acc_each, *l = m + count * stat_each;
  const bool parallel = tokens * a.kv_heads * (a.dk + a.dv) > SERIAL;
#pragma omp parallel if (parallel)
  {
    std::vector<Way> ways;
    ways.reserve(heads_each);
    for (int64_t h = 0; h < heads_each; h++) ways.emplace_back(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t k = 0; k < count; k++) {
      const Piece& x = pieces[k];
      piece<T, Way>(a, ways.data(), x.i, x.from, x.to, x.h0, x.h0 + heads_each, acc + k * acc_each, m + k * stat_each,
                    l + k * stat_each, stat);
    }
#pragma omp for schedule(static)
    for (int64_t ih = 0; ih < a.batch * head_parts; ih++)
      for (int64_t h = 0; h < heads_each; h++)
        for (int64_t g = 0; g < a.group; g++) {
          const int64_t k0 = first[ih], k1 = first[ih + 1], s = h * stat + g;
          float* out = a.out + ((ih / head_parts * a.kv_heads + ih % head_parts * heads_each + h) * a.group + g) * a.dv;
          memset(out, 0, a.dv * sizeof(float));
          float top = LOWEST, total = 0;
          for (int64_t k = k0; k < k1; k++) top = m[k * stat_each + s] <= top ? top : m[k * stat_each + s];
          for (int64_t k = k0; k < k1; k++) total += std::exp2(m[k * stat_each + s] - top) * l[k * stat_each + s];
          for (int64_t k = k0; k < k1; k++) {
            const float w = std::exp2(m[k * stat_each + s] - top) / total;
            const float* from = acc + k * acc_each + h * shape.acc_size() + g * a.dv;
            for (int64_t d = 0; d < a.dv; d++) out[d] += w * from[d];
          }
        }
  }
}

static const int64_t MANY = 17;   // query heads a KV head from which matrix products are faster

template <class T> static void choose(const Attention& a, bool exact) {
#if defined(HAS_PAIRS)
  if constexpr (std::is_same_v<T, BF16> || is_fp8<T>)
    if (!exact && a.dv % 32 == 0) {
      if (a.group >= MANY) return attend<T, Many<T, Pairs>>(a);
      return attend<T, Quads<T>>(a);
    }
#endif
  (void)exact;
  if (a.group >= MANY) return attend<T, Many<T, Floats>>(a);
  attend<T, Few<T>>(a);
}

// dtype codes: 0 float32, 1 bfloat16, 2 float16, 3 float8_e4m3fn, 4 float8_e5m2. `exact`: the queries hold
// more than bfloat16 does, so that products must be float32.
extern "C" int decode_attention(
    const void* kv, int dtype, int64_t block_stride, int64_t head_stride, int64_t entry_stride,
    const int32_t* table, int64_t table_width, const int64_t* start, const int64_t* stop, int64_t batch,
    int64_t kv_heads, int64_t group, int64_t entries, int64_t dk, int64_t dv, int64_t v_offset,
    const float* q, double scale, int exact, float* out) {
  Attention a{kv, block_stride, head_stride, entry_stride, table, table_width, start, stop, batch,
              kv_heads, group, entries, dk, dv, v_offset, q, (float)(scale * 1.4426950408889634), out};
  switch (dtype) {
    case 0: choose<F32>(a, exact); return 0;
    case 1: choose<BF16>(a, exact); return 0;
    case 2: choose<F16>(a, exact); return 0;
    case 3: choose<E4M3>(a, exact); return 0;
    case 4: choose<E5M2>(a, exact); return 0;
  }
  return 1;
}
