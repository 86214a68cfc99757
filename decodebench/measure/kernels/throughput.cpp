// What this processor's vector units do: the arithmetic limits that a decode step is measured against. Each
// thread works in registers alone, so that no memory is in the way.

#include "vectors.h"

static const int CHAINS = 12;   // independent accumulators: more than a unit's latency times its width

// 2 * 16 * CHAINS * count operations a thread: multiplications and additions of float32
extern "C" float vector_multiply_add(int64_t count) {
  float total = 0;
#pragma omp parallel reduction(+ : total)
  {
    V acc[CHAINS];
    for (int i = 0; i < CHAINS; i++) acc[i] = splat(1.0f + i);
    const V a = splat(0.999f), b = splat(0.001f);   // no -ffast-math: iterations cannot be folded
    for (int64_t n = 0; n < count; n++)
      for (int i = 0; i < CHAINS; i++) acc[i] = acc[i] * a + b;
    for (int i = 0; i < CHAINS; i++) total += sum(acc[i]);
  }
  return total;
}

// 16 * 4 * count exponentials a thread
extern "C" float vector_exponentials(int64_t count) {
  float total = 0;
#pragma omp parallel reduction(+ : total)
  {
    V x[4], acc[4] = {};
    for (int i = 0; i < 4; i++) x[i] = splat(-0.1f - i);
    for (int64_t n = 0; n < count; n++)
      for (int i = 0; i < 4; i++) { acc[i] += vexp2(x[i]); x[i] = x[i] * 0.999f; }
    for (int i = 0; i < 4; i++) total += sum(acc[i]);
  }
  return total;
}
