/* Exact top-k of a float32 vector in four passes and without a copy.

   A magnitude, seen as bits, is a whole number of the same order: key(x) = bits of |x|, and NaN counts as infinity.
   The k-th largest key t is found digit by digit from the top, 11 + 10 + 10 bits: count the digits of the keys that
   share all digits fixed so far, walk down from the largest until k are covered. One last pass takes every key > t and,
   in order of index, as many keys == t as are missing. The time is linear whatever the numbers are. */

#include <stdint.h>
#include <string.h>

static uint32_t key(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0x7f800000u;
}

/* The k-th largest key, 1 <= k <= n; `ties` becomes the number of equal keys to take. */
static uint32_t threshold(const float *x, int64_t n, int64_t k, int64_t *ties) {
    static const int shifts[] = {20, 10, 0};
    uint32_t found = 0, fixed = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level];
        const uint32_t digits = level == 0 ? 2047u : 1023u;
        int64_t count[2048] = {0};
        for (int64_t i = 0; i < n; i++) {
            const uint32_t a = key(x[i]);
            if ((a & fixed) == found) count[(a >> shift) & digits]++;
        }
        uint32_t digit = digits;
        while (digit > 0 && count[digit] < k) k -= count[digit--];
        found |= digit << shift;
        fixed |= digits << shift;
    }
    *ties = k;
    return found;
}

/* Write indices (ascending) and values of the k largest |x|; returns how many were written. */
int64_t manyhands_largest(const float *x, int64_t n, int64_t k, int32_t *indices, float *values) {
    int64_t taken = 0, ties = 0;
    if (k < 1 || k > n) return 0;
    const uint32_t t = threshold(x, n, k, &ties);
    for (int64_t i = 0; i < n && taken < k; i++) {
        const uint32_t a = key(x[i]);
        if (a < t || (a == t && ties-- <= 0)) continue;
        indices[taken] = (int32_t)i;
        values[taken++] = x[i];
    }
    return taken;
}
