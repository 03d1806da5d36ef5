/* A gate in memory that several processes share. Every place has a line of its own in the cache:

     arrived    the number of the last meeting it has come to
     asleep     0, or which place of which meeting it has stopped looking for and must be told about

   Only one of two can take an `asleep` back to 0: its owner, who has looked once more, or whoever arrives, who then
   tells it. So nobody sleeps through an arrival, and nobody is told what it knows. */

#include <stdint.h>
#include <time.h>

#define STRIDE 16
#define ARRIVED(cells, place) ((cells) + (place) * STRIDE)
#define ASLEEP(cells, place) ((cells) + (place) * STRIDE + STRIDE / 2)
#define LOOKS 64

static int64_t code(int64_t number, int64_t places, int64_t place) { return number * places + place + 1; }

static int take_back(int64_t *asleep, int64_t expected) {
    return __atomic_compare_exchange_n(asleep, &expected, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static int has_arrived(int64_t *cells, int64_t place, int64_t number) {
    return __atomic_load_n(ARRIVED(cells, place), __ATOMIC_SEQ_CST) >= number;
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* `me` is here; the places that must be told are written to `sleepers`, and how many they are comes back. */
int64_t manyhands_arrive(int64_t *cells, int64_t me, int64_t places, int64_t number, int64_t *sleepers) {
    int64_t count = 0;
    __atomic_store_n(ARRIVED(cells, me), number, __ATOMIC_SEQ_CST);
    for (int64_t place = 0; place < places; place++)
        if (place != me && take_back(ASLEEP(cells, place), code(number, places, me))) sleepers[count++] = place;
    return count;
}

/* Look for `other` for some nanoseconds: 1 if it is there, 0 if it will tell. */
int32_t manyhands_await(int64_t *cells, int64_t me, int64_t other, int64_t places, int64_t number, int64_t patience) {
    const int64_t ends = nanoseconds() + patience;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (has_arrived(cells, other, number)) return 1;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
    } while (nanoseconds() < ends);
    __atomic_store_n(ASLEEP(cells, me), code(number, places, other), __ATOMIC_SEQ_CST);
    return has_arrived(cells, other, number) && take_back(ASLEEP(cells, me), code(number, places, other));
}
