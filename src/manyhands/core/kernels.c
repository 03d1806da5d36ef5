/* Copy past the caches: what is written here is read much later, or by somebody else, so it need not be fetched first.
   For blocks that have just been computed this saves one of the three times that memory is touched. */

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

void manyhands_stream(char *to, const char *from, int64_t nbytes) {
#if defined(__SSE2__)
    int64_t head = (int64_t)((16 - ((uintptr_t)to & 15)) & 15);
    if (head > nbytes) head = nbytes;
    memcpy(to, from, (size_t)head);
    to += head, from += head, nbytes -= head;
    int64_t i = 0;
    for (; i + 64 <= nbytes; i += 64) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(from + i));
        const __m128i b = _mm_loadu_si128((const __m128i *)(from + i + 16));
        const __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32));
        const __m128i d = _mm_loadu_si128((const __m128i *)(from + i + 48));
        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    _mm_sfence();
    to += i, from += i, nbytes -= i;
#endif
    memcpy(to, from, (size_t)nbytes);
}

/* w <- w + scale g, and the same to `out`, past the caches: memory is touched four times instead of six.
   The product is rounded before it is added, as torch does it in two steps. */
void manyhands_step_into(float *w, const float *g, float *out, float scale, int64_t n) {
    int64_t i = 0;
#if defined(__SSE2__)
    const __m128 scales = _mm_set1_ps(scale);
    for (; i < n && ((uintptr_t)(out + i) & 15); i++) out[i] = w[i] += scale * g[i];
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 16; j += 4) {
            const __m128 step = _mm_mul_ps(_mm_loadu_ps(g + i + j), scales);
            const __m128 sum = _mm_add_ps(_mm_loadu_ps(w + i + j), step);
            _mm_storeu_ps(w + i + j, sum);
            _mm_stream_ps(out + i + j, sum);
        }
    }
    _mm_sfence();
#endif
    for (; i < n; i++) out[i] = w[i] += scale * g[i];
}

static float mean_at(const float *const *gs, int64_t count, int64_t i) {
    float sum = gs[0][i];
    for (int64_t k = 1; k < count; k++) sum += gs[k][i];
    return sum / (float)count;
}

/* out <- (g_0 + g_1 + ...) / count, past the caches. Every sum is rounded, in this order, and then divided. */
void manyhands_mean(float *out, const float *const *gs, int64_t count, int64_t n) {
    int64_t i = 0;
#if defined(__SSE2__)
    const __m128 counts = _mm_set1_ps((float)count);
    for (; i < n && ((uintptr_t)(out + i) & 15); i++) out[i] = mean_at(gs, count, i);
    for (; i + 16 <= n; i += 16) {
        __m128 sums[4];
        for (int j = 0; j < 4; j++) sums[j] = _mm_loadu_ps(gs[0] + i + 4 * j);
        for (int64_t k = 1; k < count; k++)
            for (int j = 0; j < 4; j++) sums[j] = _mm_add_ps(sums[j], _mm_loadu_ps(gs[k] + i + 4 * j));
        for (int j = 0; j < 4; j++) _mm_stream_ps(out + i + 4 * j, _mm_div_ps(sums[j], counts));
    }
    _mm_sfence();
#endif
    for (; i < n; i++) out[i] = mean_at(gs, count, i);
}
