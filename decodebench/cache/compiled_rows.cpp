// Rows of a cache written, or read back and judged, in one parallel pass over their bytes.
//
// Plain C entry points, called through ctypes. All rows of all layers and parts of a step are one line of
// bytes, cut into equal pieces that the threads take as they come: no thread waits for another but once,
// at the end, and a thread that other work holds up takes fewer pieces.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

typedef uint64_t Word __attribute__((vector_size(64), may_alias));
struct Unaligned { Word value; } __attribute__((packed, may_alias));

static inline Word load(const char* p) { return ((const Unaligned*)p)->value; }
static inline void store(char* p, Word v) { ((Unaligned*)p)->value = v; }
static inline bool any(Word v) {
  uint64_t all = 0;
  for (int i = 0; i < 8; i++) all |= v[i];
  return all != 0;
}
// past the caches: the line is not read first, and nothing that decode needs is thrown out for it
static inline void stream(char* p, Word v) {   // p: a multiple of 64
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)p, (__m512i)v);
#elif defined(__SSE2__)
  const __m128i* part = (const __m128i*)&v;
  for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i*)p + i, part[i]);
#else
  store(p, v);
#endif
}
static inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// One part of some layers: rows of `bytes` bytes at base + layer * layer_stride + ids[i] * block_stride.
// Their content is `pattern`, 8 bytes over and over, or a window of a bank of noise: element e of layer l
// and block b is bank[(shift + l * layer_shift + b * block_shift + e) mod period], and the bank's elements
// behind `period` repeat its beginning.
struct Rows {
  char* base;
  int64_t layers, layer_stride, block_stride, bytes;
  const int64_t* ids;
  int64_t num_ids, itemsize;
  uint64_t pattern;
  const char* bank;
  int64_t bank_elements, period, shift, layer_shift, block_shift;
  uint8_t* found;   // [layers, num_ids]: bits ZERO, POISON, EQUAL
};
enum { ZERO = 1, POISON = 2, EQUAL = 4 };
static const int64_t TILE = 128 << 10;    // bytes of a row written in one go: a window of them stays in the L2
static const int64_t PIECE = 1 << 20;     // bytes that a thread takes at a time
static const int64_t SERIAL = 256 << 10;  // bytes that one thread moves before a second has woken up
static const int64_t CACHED = 8 << 20;    // a step that small is written through the caches: they hold it

// Calls work(rows, layer, i, from, to) for bytes [from, to) of row i of a layer, until all are done.
template <class F> static void over_bytes(const Rows* all, int64_t count, F work) {
  std::vector<int64_t> end(count), each(count);   // pieces of the rows up to here; tiles a piece
  int64_t pieces = 0, total = 0;
  for (int64_t j = 0; j < count; j++) {
    const Rows& r = all[j];
    const int64_t tiles = r.layers * r.num_ids * ((r.bytes + TILE - 1) / TILE);
    each[j] = std::max<int64_t>(1, PIECE / std::min(TILE, std::max<int64_t>(1, r.bytes)));
    end[j] = pieces += (tiles + each[j] - 1) / each[j];
    total += r.layers * r.num_ids * r.bytes;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel if (total > SERIAL)
  for (int64_t piece; (piece = next.fetch_add(1)) < pieces;) {
    const int64_t j = std::upper_bound(end.begin(), end.end(), piece) - end.begin();
    const Rows& r = all[j];
    const int64_t columns = (r.bytes + TILE - 1) / TILE, tiles = r.layers * r.num_ids * columns;
    const int64_t first = (piece - (j ? end[j - 1] : 0)) * each[j];
    for (int64_t tile = first; tile < std::min(first + each[j], tiles); tile++) {
      int64_t layer, i, column;
      if (r.bank) {   // the windows of a block's layers are nearly the same: read them one after another
        layer = tile % r.layers; column = tile / r.layers % columns; i = tile / r.layers / columns;
      } else if (r.block_stride > r.layer_stride) {   // in the order of memory
        column = tile % columns; layer = tile / columns % r.layers; i = tile / columns / r.layers;
      } else {
        column = tile % columns; i = tile / columns % r.num_ids; layer = tile / columns / r.num_ids;
      }
      work(r, layer, i, column * TILE, std::min(r.bytes, (column + 1) * TILE));
    }
    end_of_stream();
  }
}

// Calls piece(bytes of content, from, to) for a window of the bank, split where the bank ends.
template <class F> static void over_window(const Rows& r, int64_t layer, int64_t block, int64_t from, int64_t to,
                                           F piece) {
  const int64_t start = (r.shift + layer * r.layer_shift + block * r.block_shift) % r.period;
  while (from < to) {
    const int64_t element = (start + from / r.itemsize) % r.period, odd = from % r.itemsize;
    const int64_t room = (r.bank_elements - element) * r.itemsize - odd;
    const int64_t length = std::min(room, to - from);
    piece(r.bank + element * r.itemsize + odd, from, from + length);
    from += length;
  }
}

static inline char* place(const Rows& r, int64_t layer, int64_t i) {
  return r.base + layer * r.layer_stride + r.ids[i] * r.block_stride;
}

template <bool PAST_CACHES> static inline void put(char* to, Word v) {
  if (PAST_CACHES) stream(to, v); else store(to, v);
}

template <bool PAST_CACHES> static void copy(char* to, const char* from, int64_t n) {
  const int64_t head = std::min<int64_t>(n, -(intptr_t)to & 63);
  memcpy(to, from, head);
  int64_t i = head;
  for (; i + 256 <= n; i += 256) {
    Word a = load(from + i), b = load(from + i + 64), c = load(from + i + 128), d = load(from + i + 192);
    put<PAST_CACHES>(to + i, a); put<PAST_CACHES>(to + i + 64, b);
    put<PAST_CACHES>(to + i + 128, c); put<PAST_CACHES>(to + i + 192, d);
  }
  for (; i + 64 <= n; i += 64) put<PAST_CACHES>(to + i, load(from + i));
  memcpy(to + i, from + i, n - i);
}

template <bool PAST_CACHES> static void repeat(char* to, uint64_t pattern, int64_t phase, int64_t n) {
  char twice[128];   // the pattern from any of its bytes on
  for (int i = 0; i < 16; i++) memcpy(twice + 8 * i, &pattern, 8);
  const int64_t head = std::min<int64_t>(n, -(intptr_t)to & 63);
  memcpy(to, twice + phase % 8, head);
  const Word v = load(twice + (phase + head) % 8);
  int64_t i = head;
  for (; i + 64 <= n; i += 64) put<PAST_CACHES>(to + i, v);
  memcpy(to + i, &v, n - i);
}

template <bool PAST_CACHES> static void write_all(const Rows* all, int64_t count) {
  over_bytes(all, count, [](const Rows& r, int64_t layer, int64_t i, int64_t from, int64_t to) {
    char* row = place(r, layer, i);
    if (!r.bank) return repeat<PAST_CACHES>(row + from, r.pattern, from, to - from);
    over_window(r, layer, r.ids[i], from, to,
                [&](const char* content, int64_t a, int64_t b) { copy<PAST_CACHES>(row + a, content, b - a); });
  });
}

extern "C" void write_rows(const Rows* all, int64_t count) {
  int64_t total = 0;
  for (int64_t j = 0; j < count; j++) total += all[j].layers * all[j].num_ids * all[j].bytes;
  if (total > CACHED) write_all<true>(all, count); else write_all<false>(all, count);
}

// Which of zero, poison and equal still hold for n bytes beside their content (`still`: those in question).
template <class Content> static int judge(const char* at, int64_t n, int still, Content content) {
  int64_t i = 0;
  const Word ones = ~Word{};
  while (i + 64 <= n && still) {   // look up now and then: a row that is none of the three is done
    const int64_t stop = i + std::min<int64_t>(4096, (n - i) / 64 * 64);
    Word zero{}, poison{}, differs{};
    if (still & EQUAL)
      for (; i < stop; i += 64) {
        const Word x = load(at + i);
        zero |= x; poison |= x ^ ones; differs |= x ^ content(i);
      }
    else
      for (; i < stop; i += 64) { const Word x = load(at + i); zero |= x; poison |= x ^ ones; }
    still &= (any(zero) ? 0 : ZERO) | (any(poison) ? 0 : POISON) | (any(differs) ? 0 : EQUAL);
  }
  if (i < n && still) {
    char bytes[64] = {}, wanted[64] = {};
    memcpy(bytes, at + i, n - i);
    const Word x = load(bytes);
    if (any(x)) still &= ~ZERO;
    for (int64_t k = 0; k < n - i; k++) if ((uint8_t)bytes[k] != 0xff) still &= ~POISON;
    if (still & EQUAL) {
      content.last(wanted, i, n - i);
      if (any(x ^ load(wanted))) still &= ~EQUAL;
    }
  }
  return still;
}
struct Same {
  char twice[128];
  Word value;
  Same(uint64_t pattern, int64_t phase) {
    for (int i = 0; i < 16; i++) memcpy(twice + 8 * i, &pattern, 8);
    value = load(twice + phase % 8);
  }
  Word operator()(int64_t) const { return value; }
  void last(char* to, int64_t, int64_t n) const { memcpy(to, &value, n); }
};
struct Window {
  const char* bank;
  Word operator()(int64_t i) const { return load(bank + i); }
  void last(char* to, int64_t i, int64_t n) const { memcpy(to, bank + i, n); }
};

extern "C" void judge_rows(const Rows* all, int64_t count) {
  over_bytes(all, count, [](const Rows& r, int64_t layer, int64_t i, int64_t from, int64_t to) {
    uint8_t* found = r.found + layer * r.num_ids + i;
    const char* row = place(r, layer, i);
    int still = __atomic_load_n(found, __ATOMIC_RELAXED);
    if (!r.bank) still = judge(row + from, to - from, still, Same(r.pattern, from));
    else
      over_window(r, layer, r.ids[i], from, to, [&](const char* content, int64_t a, int64_t b) {
        still = judge(row + a, b - a, still, Window{content});
      });
    __atomic_and_fetch(found, still, __ATOMIC_RELAXED);
  });
}
