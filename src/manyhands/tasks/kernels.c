/* Linear models of few features per sample: row i has the features v_ij with the values x_ij, `columns` of each.
   The weights may be written by other processes meanwhile: every number is read and written as it is found. */

#include <stdint.h>

#if defined(__x86_64__)
#define FETCHES_FOR_WRITING __attribute__((target("prfchw"))) /* without it, a plain prefetch */
#else
#define FETCHES_FOR_WRITING
#endif

/* z_i = sum_j x_ij w[v_ij]; gives 0 as soon as it meets a feature that is none of the n, else 1.
   What is read here is written soon. So it is fetched for writing, a row ahead: if another process has written it last,
   it comes over from that core once, and not to be read and once more to be written. */
FETCHES_FOR_WRITING int32_t manyhands_dots(const float *w, int64_t n, const int64_t *v, const float *x, int64_t rows,
                                           int64_t columns, float *z) {
    for (int64_t i = 0; i < rows; i++, v += columns, x += columns) {
        const int64_t ahead = i + 1 < rows ? columns : 0;
        float sum = 0;
        for (int64_t j = 0; j < columns; j++) {
            if ((uint64_t)v[j] >= (uint64_t)n) return 0;
            __builtin_prefetch(&w[v[j + ahead]], 1);
            sum += x[j] * w[v[j]];
        }
        z[i] = sum;
    }
    return 1;
}

/* w[v_ij] <- w[v_ij] + (scale r_i) x_ij, in this order. The features were met by manyhands_dots before. */
void manyhands_scatter(float *w, const int64_t *v, const float *x, int64_t rows, int64_t columns, const float *r,
                       float scale) {
    for (int64_t i = 0; i < rows; i++, v += columns, x += columns) {
        const float step = scale * r[i];
        for (int64_t j = 0; j < columns; j++) w[v[j]] += step * x[j];
    }
}
