/* Codecs in C, for float32: the largest numbers, signs with two means, stochastic rounding to a few levels.

   Every function has a twin in fallback.py that makes the same bits. So sums have an order of their own, random numbers
   depend on the place of a number only, and every operation rounds once.

     sum of a row      64 lanes:  lane[l] = x[l] + x[l + 64] + x[l + 128] + ...
                       then  lane[l] += lane[l + 32],  lane[l] += lane[l + 16],  ...  and lane[0] is the sum
     by its signs      the lanes of each 1024 numbers by themselves; those are added one after the other

   A loop over all numbers is one that compilers make vectors of: it writes a byte for each number into the nearest
   cache, and then many bytes become a few bits at once, or the other way round. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "of numbers that share a byte the first lies in the lowest bits"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12
#define HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define WIDE __attribute__((target("arch=x86-64-v4")))
#else
#define HOT
#endif

#define TILE 1024 /* numbers whose bytes stay in the nearest cache; whole words, however they are packed */
#define LANES 64
#define CHUNK 1024 /* numbers whose lanes are summed by themselves, by their signs */
#define TINY 0x1p-100f /* a norm that is less counts as 0, for its reciprocal might be none */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* -- bytes and bits ---------------------------------------------------------------------------------------------- */

/* The highest bits of 64 bytes. */
static inline uint64_t gathered(const uint8_t *bytes) {
    uint64_t word = 0;
#if defined(__SSE2__)
    for (int i = 0; i < 4; i++) {
        const __m128i some = _mm_loadu_si128((const __m128i *)(bytes + 16 * i));
        word |= (uint64_t)(uint32_t)_mm_movemask_epi8(some) << 16 * i;
    }
#else
    for (int i = 0; i < 64; i++) word |= (uint64_t)(bytes[i] >> 7) << i;
#endif
    return word;
}

/* A byte for each bit, and not 0 where the bit is 1. */
static void spread(const uint8_t *bits, int64_t n, uint8_t *bytes) {
    for (int64_t i = 0; 8 * i < n; i++) {
        const uint64_t eight = bits[i] * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
        memcpy(bytes + 8 * i, &eight, 8);
    }
}

/* -- the largest ------------------------------------------------------------------------------------------------- */

/* A magnitude, seen as bits, is a whole number of the same order; NaN counts as infinity. */
static inline int32_t key(float x) {
    const int32_t bits = bits_of(x) & 0x7fffffff;
    return MIN(bits, 0x7f800000);
}

/* The k-th largest key, 1 <= k <= n; `ties` becomes the number of equal keys to take. It is found digit by digit from
   the top, 11 + 10 + 10 bits: count the digits of the keys that share all digits fixed so far, walk down from the
   largest until k are covered. The time is linear whatever the numbers are. */
static int32_t threshold(const float *x, int64_t n, int64_t k, int64_t *ties) {
    static const int shifts[] = {20, 10, 0};
    int32_t found = 0, fixed = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level];
        const int32_t digits = level == 0 ? 2047 : 1023;
        int64_t count[2048] = {0};
        for (int64_t i = 0; i < n; i++) {
            const int32_t a = key(x[i]);
            if ((a & fixed) == found) count[(a >> shift) & digits]++;
        }
        int32_t digit = digits;
        while (digit > 0 && count[digit] < k) k -= count[digit--];
        found |= digit << shift;
        fixed |= digits << shift;
    }
    *ties = k;
    return found;
}

HOT static void reaches(const float *x, int64_t n, int32_t least, uint8_t *bytes) {
    for (int64_t i = 0; i < n; i++) bytes[i] = key(x[i]) >= least ? 255 : 0;
}

static int64_t collect(const float *x, int64_t n, int32_t least, int64_t room, int32_t *indices) {
    int64_t found = 0;
    for (int64_t tile = 0; tile < n; tile += TILE) {
        uint8_t bytes[TILE];
        const int64_t many = MIN(TILE, n - tile);
        reaches(x + tile, many, least, bytes);
        memset(bytes + many, 0, (size_t)(TILE - many));
        for (int64_t i = 0; i < many; i += 64)
            for (uint64_t word = gathered(bytes + i); word; word &= word - 1) {
                if (found == room) return found;
                indices[found++] = (int32_t)(tile + i + __builtin_ctzll(word));
            }
    }
    return found;
}

/* Indices (ascending) of the first numbers with |x| >= t, at most `room`; returns how many. */
int64_t manyhands_reaching(const float *x, int64_t n, float t, int64_t room, int32_t *indices) {
    return collect(x, n, key(t), room, indices);
}

/* Write indices (ascending) and values of the k largest |x|, 1 <= k <= n, of equal ones the first; returns how many.
   Of `sampled` numbers the `rank`-th largest is what most of those beyond k cannot reach, so that only a few have to be
   sorted out; `spare` and `held` have room for either. 0 sampled, or a sample that misleads: all have to be. */
int64_t manyhands_largest(const float *x, int64_t n, int64_t k, int64_t sampled, int64_t rank, int64_t room,
                          int32_t *spare, float *held, int32_t *indices, float *values) {
    int64_t taken = 0, ties = 0, few = 0;
    if (sampled > 0) {
        for (int64_t i = 0; i < sampled; i++) held[i] = x[i * (n / sampled)];
        few = collect(x, n, threshold(held, sampled, rank, &ties), room, spare);
    }
    const int guided = few >= k && few < room;
    for (int64_t i = 0; guided && i < few; i++) held[i] = x[spare[i]];
    const float *a = guided ? held : x;
    const int64_t many = guided ? few : n;
    const int32_t t = threshold(a, many, k, &ties);
    for (int64_t i = 0; i < many && taken < k; i++) {
        if (key(a[i]) < t || (key(a[i]) == t && ties-- <= 0)) continue;
        indices[taken] = guided ? spare[i] : (int32_t)i;
        values[taken++] = a[i];
    }
    return taken;
}

/* -- sums -------------------------------------------------------------------------------------------------------- */

static inline float folded(float *lane) {
    for (int l = 0; l < 32; l++) lane[l] += lane[l + 32];
    for (int l = 0; l < 16; l++) lane[l] += lane[l + 16];
    for (int l = 0; l < 8; l++) lane[l] += lane[l + 8];
    for (int l = 0; l < 4; l++) lane[l] += lane[l + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

/* The last numbers of a row of n that are no multiple of LANES, and zeros; returns how many zeros. */
static int64_t copy_rest(const float *x, int64_t n, float *rest) {
    const int64_t many = n % LANES;
    memset(rest, 0, LANES * sizeof *rest);
    memcpy(rest, x + n - many, (size_t)many * sizeof *x);
    return LANES - many;
}

/* -- signs ------------------------------------------------------------------------------------------------------- */

HOT static void signs(const float *x, int64_t n, uint8_t *bytes) {
    for (int64_t i = 0; i < n; i++) bytes[i] = x[i] >= 0 ? 255 : 0;
}

/* The signs of x[from .. upto) as bits, whole words of them or all, `from` a multiple of 64. Returns where it ends. */
static int64_t pack_signs(const float *x, int64_t from, int64_t upto, int all, uint8_t *bits) {
    while (from + (all ? 1 : 64) <= upto) {
        uint8_t bytes[TILE];
        const int64_t many = MIN(TILE, all ? upto - from : (upto - from) / 64 * 64);
        signs(x + from, many, bytes);
        if (many % 64) memset(bytes + many, 0, 64 - (size_t)(many % 64));
        for (int64_t i = 0; i < many; i += 64) {
            const uint64_t word = gathered(bytes + i);
            memcpy(bits + (from + i) / 8, &word, (size_t)MIN(8, (many - i + 7) / 8));
        }
        from += many;
    }
    return from;
}

/* To the sums of columns come some more rows: of numbers below 0, and of the others with how many they are. */
static inline void add_rows(const float *restrict x, int rows, int64_t columns, float *restrict below,
                            float *restrict above, int32_t *restrict count) {
    for (int64_t j = 0; j < columns; j++) {
        float low = below[j], high = above[j];
        int32_t many = count[j];
        for (int i = 0; i < rows; i++) {
            const int32_t a = bits_of(x[i * columns + j]), is_above = -(x[i * columns + j] >= 0);
            many -= is_above;
            high += float_of(a & is_above);
            low += float_of(a & ~is_above);
        }
        below[j] = low, above[j] = high, count[j] = many;
    }
}

#define SOME 4 /* rows that are added at once: their sums stay in registers meanwhile */

HOT static void add_some(const float *x, int64_t columns, float *below, float *above, int32_t *count) {
    add_rows(x, SOME, columns, below, above, count);
}

HOT static void add_one(const float *x, int64_t columns, float *below, float *above, int32_t *count) {
    add_rows(x, 1, columns, below, above, count);
}

static void add_signs(const float *x, int64_t rows, int64_t columns, float *below, float *above, int32_t *count) {
    int64_t row = 0;
    for (; row + SOME <= rows; row += SOME) add_some(x + row * columns, columns, below, above, count);
    for (; row < rows; row++) add_one(x + row * columns, columns, below, above, count);
}

typedef struct {
    float below, above;
    int64_t count;
} Sums;

static void add_lanes(const float *from, float *to) {
    for (int l = 0; l < LANES; l++) to[l] += from[l];
}

static Sums sums_of_signs(const float *x, int64_t n) {
    float below[LANES] = {0}, above[LANES] = {0}, rest[LANES];
    int32_t count[LANES] = {0};
    int64_t total = 0;
    for (int64_t chunk = 0; chunk < n; chunk += CHUNK) {
        const int64_t many = MIN(CHUNK, n - chunk);
        float low[LANES] = {0}, high[LANES] = {0};
        add_signs(x + chunk, many / LANES, LANES, low, high, count);
        if (many % LANES) {
            total -= copy_rest(x + chunk, many, rest);
            add_signs(rest, 1, LANES, low, high, count);
        }
        add_lanes(low, below);
        add_lanes(high, above);
    }
    for (int l = 0; l < LANES; l++) total += count[l];
    return (Sums){folded(below), folded(above), total};
}

#if defined(WIDE)
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Whole __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));

/* Sums and bits of whole words at once, where a vector is as wide as a quarter of the lanes. A number plus 0 is never
   -0, so whether it is below 0 is its highest bit. */
WIDE static Sums sums_and_signs(const float *x, int64_t n, uint8_t *bits) {
    Floats below[4] = {{0}}, above[4] = {{0}}, row;
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < n; chunk += CHUNK) {
        Floats low[4] = {{0}}, high[4] = {{0}};
        for (int64_t i = chunk; i < MIN(n, chunk + CHUNK); i += LANES) {
            uint64_t word = 0;
            for (int v = 0; v < 4; v++) {
                memcpy(&row, x + i + 16 * v, sizeof row);
                const Whole a = (Whole)(row + 0.0f), is_below = a >> 31;
                low[v] += (Floats)(a & is_below);
                high[v] += (Floats)(a & ~is_below);
                const Bytes bytes = __builtin_convertvector(is_below, Bytes);
                word |= (uint64_t)(uint32_t)_mm_movemask_epi8((__m128i)bytes) << 16 * v;
            }
            word = ~word;
            count += __builtin_popcountll(word);
            memcpy(bits + i / 8, &word, sizeof word);
        }
        for (int v = 0; v < 4; v++) below[v] += low[v], above[v] += high[v];
    }
    return (Sums){folded((float *)below), folded((float *)above), count};
}
#define IS_WIDE __builtin_cpu_supports("x86-64-v4")
#else
#define IS_WIDE 0
#define sums_and_signs(x, n, bits) sums_of_signs(x, n)
#endif

/* Never -0: whoever chooses between two means that are 0 then needs not know which it is. */
static float mean(float sum, int64_t count) { return count ? sum / (float)count + 0.0f : 0; }

/* Bits of all signs, 1 for x >= 0; for each block of numbers the mean of those with bit 0 and, `blocks` further on, of
   those with bit 1. */
void manyhands_signs(const float *x, int64_t n, int64_t block, uint8_t *bits, float *means) {
    const int64_t blocks = (n + block - 1) / block;
    const int wide = block % LANES == 0 && IS_WIDE;
    int64_t packed = 0;
    for (int64_t b = 0, start = 0, many; b < blocks; b++, start += many) {
        Sums s;
        many = MIN(block, n - start);
        if (wide && many == block) {
            s = sums_and_signs(x + start, many, bits + start / 8);
            packed = start + many;
        } else {
            s = sums_of_signs(x + start, many);
            packed = pack_signs(x, packed, start + many, b + 1 == blocks, bits);
        }
        means[b] = mean(s.below, many - s.count);
        means[blocks + b] = mean(s.above, s.count);
    }
}

/* The same for the columns of a matrix, whose rows are added one after the other; `means` and `count` begin as 0. */
void manyhands_column_signs(const float *x, int64_t rows, int64_t columns, uint8_t *bits, float *means,
                            int32_t *count) {
    int64_t packed = 0;
    for (int64_t row = 0; row < rows; row += SOME) {
        const int64_t many = MIN(SOME, rows - row);
        add_signs(x + row * columns, many, columns, means, means + columns, count);
        packed = pack_signs(x, packed, (row + many) * columns, row + many == rows, bits);
    }
    for (int64_t j = 0; j < columns; j++) {
        means[j] = mean(means[j], rows - count[j]);
        means[columns + j] = mean(means[columns + j], count[j]);
    }
}

HOT static void choose(const uint8_t *restrict bytes, int64_t n, float below, float above, float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] = bytes[i] ? above : below;
}

HOT static void choose_each(const uint8_t *restrict bytes, int64_t n, const float *restrict below,
                            const float *restrict above, float *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        const int32_t is_above = -(bytes[i] != 0);
        out[i] = float_of((bits_of(above[i]) & is_above) | (bits_of(below[i]) & ~is_above));
    }
}

void manyhands_unsign(const uint8_t *bits, int64_t n, int64_t block, const float *means, float *out) {
    const int64_t blocks = (n + block - 1) / block;
    for (int64_t tile = 0; tile < n; tile += TILE) {
        uint8_t bytes[TILE];
        const int64_t upto = MIN(n, tile + TILE);
        spread(bits + tile / 8, upto - tile, bytes);
        for (int64_t i = tile, stop; i < upto; i = stop) {
            const int64_t b = i / block;
            stop = MIN(upto, (b + 1) * block);
            choose(bytes + i - tile, stop - i, means[b], means[blocks + b], out + i);
        }
    }
}

/* A strip of columns after the other. Its means are copied to half a page away from where is written, for processors
   take two places for one at first if they are the same in their pages. */
void manyhands_column_unsign(const uint8_t *bits, int64_t rows, int64_t columns, const float *means, float *out) {
    float near[2 * TILE + 1024];
    uint8_t bytes[TILE + 8];
    for (int64_t j = 0; j < columns; j += TILE) {
        const int64_t many = MIN(TILE, columns - j);
        float *below = near + (((uintptr_t)(out + j) - (uintptr_t)near + 2048) & 4095) / sizeof *near;
        float *above = below + TILE;
        memcpy(below, means + j, (size_t)many * sizeof *means);
        memcpy(above, means + columns + j, (size_t)many * sizeof *means);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t i = row * columns + j;
            spread(bits + i / 8, many + i % 8, bytes);
            choose_each(bytes + i % 8, many, below, above, out + i);
        }
    }
}

/* -- stochastic rounding ----------------------------------------------------------------------------------------- */

HOT static int32_t largest_of(const float *x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) most = MAX(most, bits_of(x[i]) & 0x7fffffff);
    return most;
}

HOT static void add_moments(const float *restrict x, int64_t rows, float *restrict sum, float *restrict squares,
                            int32_t *restrict most) {
    for (int64_t i = 0; i < rows; i++)
        for (int l = 0; l < LANES; l++) {
            const float a = x[LANES * i + l];
            const int32_t size = bits_of(a) & 0x7fffffff;
            sum[l] += a;
            squares[l] += a * a;
            most[l] = MAX(most[l], size);
        }
}

/* Of each 4096 numbers the sum and the sum of squares; returns the largest |x|. */
float manyhands_moments(const float *x, int64_t n, float *sums) {
    int32_t most[LANES] = {0};
    for (int64_t chunk = 0; chunk < n; chunk += 4096) {
        const int64_t many = MIN(4096, n - chunk);
        float sum[LANES] = {0}, squares[LANES] = {0}, rest[LANES];
        add_moments(x + chunk, many / LANES, sum, squares, most);
        if (many % LANES) {
            copy_rest(x + chunk, many, rest);
            add_moments(rest, 1, sum, squares, most);
        }
        *sums++ = folded(sum);
        *sums++ = folded(squares);
    }
    for (int l = 1; l < LANES; l++) most[0] = MAX(most[0], most[l]);
    return float_of(most[0]);
}

static inline float root(float x) {
#if defined(__SSE2__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
    return sqrtf(x);
#endif
}

HOT static void add_squares(const float *restrict x, int64_t rows, float *restrict lane) {
    for (int64_t i = 0; i < rows; i++)
        for (int l = 0; l < LANES; l++) lane[l] += x[LANES * i + l] * x[LANES * i + l];
}

/* The largest |x|, or the root of the sum of squares if those are neither too small nor too large for a float. */
static float norm_of(const float *x, int64_t n, int squared) {
    float lane[LANES] = {0}, rest[LANES];
    if (squared) add_squares(x, n / LANES, lane);
    if (squared && n % LANES) {
        copy_rest(x, n, rest);
        add_squares(rest, 1, lane);
    }
    const float sum = folded(lane);
    return sum >= 0x1p-60f && sum <= 0x1p100f ? root(sum) : float_of(largest_of(x, n));
}

/* Of numbers that are not negative: their bits are of the same order, and compilers make no branch of it. */
static inline float least(float a, float b) {
    const int32_t one = bits_of(a), two = bits_of(b);
    return float_of(MIN(one, two));
}

/* 24 random bits that follow from the place of a number and from two seeds: the finaliser of murmur3. */
static inline uint32_t random24(uint32_t place, uint32_t seed, uint32_t other) {
    uint32_t h = place * 0x9e3779b1u + seed;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13 ^ other) * 0xc2b2ae35u;
    return (h ^ h >> 16) >> 8;
}

typedef struct {
    uint32_t seed, other;
    int32_t levels;
    float limit; /* |x| counts as this if it is more */
} Rounding;

/* y = levels |x| / norm is rounded up with probability y - floor(y); level 0 has the code `levels`.
   Without a division for each number: 1 / norm is a little more than it is, so that whole y do not become less. */
HOT static void round_some(const float *restrict x, int n, uint32_t first, float norm, const Rounding r,
                           uint8_t *restrict codes) {
    const float levels = (float)r.levels, over = float_of(bits_of(levels / norm) + 1), unit = norm * 0x1p-24f;
    for (int i = 0; i < n; i++) {
        const float u = (float)(int32_t)random24(first + (uint32_t)i, r.seed, r.other);
        const float a = least(fabsf(x[i]), r.limit);
        int32_t level = (int32_t)least(a * over, levels);
        level += u * unit < a * levels - (float)level * norm;
        codes[i] = (uint8_t)(x[i] < 0 ? r.levels - level : r.levels + level);
    }
}

/* Several codes, `bits` each, become one byte. */
HOT static void pack(const uint8_t *restrict codes, int64_t nbytes, int bits, uint8_t *restrict out) {
    if (bits == 8) memcpy(out, codes, (size_t)nbytes);
    for (int64_t i = 0; bits == 4 && i < nbytes; i++) {
        uint16_t two;
        memcpy(&two, codes + 2 * i, 2);
        out[i] = (uint8_t)(two | two >> 4);
    }
    for (int64_t i = 0; bits == 2 && i < nbytes; i++) {
        uint32_t four;
        memcpy(&four, codes + 4 * i, 4);
        out[i] = (uint8_t)(four | four >> 6 | four >> 12 | four >> 18);
    }
}

HOT static void unpack(const uint8_t *restrict in, int64_t nbytes, int bits, uint8_t *restrict codes) {
    if (bits == 8) memcpy(codes, in, (size_t)nbytes);
    for (int64_t i = 0; bits == 4 && i < nbytes; i++) {
        const uint16_t two = (uint16_t)((in[i] | in[i] << 4) & 0x0f0f);
        memcpy(codes + 2 * i, &two, 2);
    }
    for (int64_t i = 0; bits == 2 && i < nbytes; i++) {
        const uint32_t a = in[i], four = (a | a << 6 | a << 12 | a << 18) & 0x03030303u;
        memcpy(codes + 4 * i, &four, 4);
    }
}

/* Round the numbers of each bucket to levels of its norm; `kind` says what that is: 0 as given, 1 the largest, 2 l2. */
void manyhands_quantise(const float *x, int64_t n, int64_t bucket, int64_t kind, float *norms, float limit,
                        int64_t levels, int64_t bits, uint32_t seed, uint32_t other, uint8_t *out) {
    const Rounding r = {seed, other, (int32_t)levels, limit};
    const int64_t each = 8 / bits;
    for (int64_t tile = 0; tile < n; tile += TILE) {
        uint8_t codes[TILE];
        const int64_t upto = MIN(n, tile + TILE);
        memset(codes, (int)levels, sizeof codes);
        for (int64_t i = tile, stop; i < upto; i = stop) {
            const int64_t b = i / bucket;
            stop = MIN(upto, (b + 1) * bucket);
            if (kind && i == b * bucket) norms[b] = norm_of(x + i, MIN(bucket, n - i), kind == 2);
            if (norms[b] >= TINY) round_some(x + i, (int)(stop - i), (uint32_t)i, norms[b], r, codes + i - tile);
        }
        pack(codes, (upto - tile + each - 1) / each, (int)bits, out + tile / each);
    }
}

HOT static int all_known(const uint8_t *codes, int64_t n, int32_t levels) {
    uint8_t most = 0;
    for (int64_t i = 0; i < n; i++) most = MAX(most, codes[i]);
    return most <= 2 * levels;
}

HOT static void scale(const uint8_t *restrict codes, int64_t n, int32_t levels, float step, float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] = (float)((int32_t)codes[i] - levels) * step;
}

/* What the codes stand for; 0, and nothing is written, if there are some that stand for nothing. */
int32_t manyhands_dequantise(const uint8_t *in, int64_t n, int64_t bucket, const float *norms, int64_t levels,
                             int64_t bits, float *out) {
    const int64_t each = 8 / bits;
    for (int writes = 0; writes < 2; writes++)
        for (int64_t tile = 0; tile < n; tile += TILE) {
            uint8_t codes[TILE];
            const int64_t upto = MIN(n, tile + TILE), nbytes = (upto - tile + each - 1) / each;
            unpack(in + tile / each, nbytes, (int)bits, codes);
            if (!writes && !all_known(codes, nbytes * each, (int32_t)levels)) return 0;
            for (int64_t i = tile, stop; writes && i < upto; i = stop) {
                const int64_t b = i / bucket;
                stop = MIN(upto, (b + 1) * bucket);
                scale(codes + i - tile, stop - i, (int32_t)levels, norms[b] / (float)levels, out + i);
            }
        }
    return 1;
}
