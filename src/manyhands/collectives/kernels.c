/* A barrier in memory that several processes share. Every rank has two lines of the cache:

     arrived    the number of the last barrier that it has reached
     asleep     0, or the barrier and the rank for which it has stopped polling and waits for a message

   Only one of two can set `asleep` back to 0: its owner, which has polled once more, or the rank that arrives, which
   then sends a message. So no rank sleeps through an arrival, and no message is sent to a rank that is awake. */

#include <stdint.h>
#include <time.h>

#define STRIDE 16
#define ARRIVED(cells, index) ((cells) + (index) * STRIDE)
#define ASLEEP(cells, index) ((cells) + (index) * STRIDE + STRIDE / 2)
#define POLLS 64

static int64_t code(int64_t number, int64_t size, int64_t index) { return number * size + index + 1; }

static int take_back(int64_t *asleep, int64_t expected) {
    return __atomic_compare_exchange_n(asleep, &expected, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static int has_arrived(int64_t *cells, int64_t index, int64_t number) {
    return __atomic_load_n(ARRIVED(cells, index), __ATOMIC_SEQ_CST) >= number;
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* `me` arrives; the indices to which a message must be sent are written to `sleepers`; returns how many they are. */
int64_t manyhands_arrive(int64_t *cells, int64_t me, int64_t size, int64_t number, int64_t *sleepers) {
    int64_t count = 0;
    __atomic_store_n(ARRIVED(cells, me), number, __ATOMIC_SEQ_CST);
    for (int64_t index = 0; index < size; index++)
        if (index != me && take_back(ASLEEP(cells, index), code(number, size, me))) sleepers[count++] = index;
    return count;
}

/* Poll for `other` for some nanoseconds: 1 if it has arrived, 0 if it will send a message. */
int32_t manyhands_await(int64_t *cells, int64_t me, int64_t other, int64_t size, int64_t number, int64_t patience) {
    const int64_t ends = nanoseconds() + patience;
    do {
        for (int poll = 0; poll < POLLS; poll++) {
            if (has_arrived(cells, other, number)) return 1;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
    } while (nanoseconds() < ends);
    __atomic_store_n(ASLEEP(cells, me), code(number, size, other), __ATOMIC_SEQ_CST);
    return has_arrived(cells, other, number) && take_back(ASLEEP(cells, me), code(number, size, other));
}
