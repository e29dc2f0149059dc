/* Copies memory and computes XXH3-64 (seed 0) of the very bytes that it copies, in one pass. A call copies many blocks, so
 * that Python's other threads neither wait for it nor hold it up between two of them.
 *
 * Why: a copy and a look at every byte, one after the other, cost a fifth more than the copy alone; the processor waits for
 * memory meanwhile. Here the arithmetic hides in that wait, and streaming stores spare the read of every line that is
 * about to be overwritten, so that the checked copy is faster than the C library's plain one (figures: docs/decisions/0153).
 *
 * The algorithm is that of xxHash (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm for Large
 * Inputs"); names and constants are the specification's. Tests compare with the xxhash package, and so does the loader.
 * Not here: inputs of 240 bytes or less, processors without AVX2, overlapping ranges. */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

enum { STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, SECRET_BYTES = 192 };
/* How far ahead of the loads lines are asked for: measured, 1 to 4 KiB are alike; none is a quarter slower. */
enum { AHEAD = 1024 };

static const uint8_t SECRET[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

/* Four of the eight lanes of the state: multiply, and add the neighbour's input. */
AVX2 static inline __m256i accumulated(__m256i state, __m256i data, const uint8_t *secret)
{
    const __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    const __m256i neighbour = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(state, neighbour));
}

AVX2 static inline __m256i scrambled(__m256i state, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    const __m256i shifted = _mm256_xor_si256(state, _mm256_srli_epi64(state, 47));
    const __m256i keyed = _mm256_xor_si256(shifted, _mm256_loadu_si256((const __m256i *)secret));
    const __m256i low = _mm256_mul_epu32(keyed, prime);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

/* One stripe into both halves of the state, and to `to`, which is aligned to 32 bytes if `streamed`. */
AVX2 static inline void stripe(__m256i state[2], uint8_t *to, const uint8_t *from, const uint8_t *secret, int streamed)
{
    const __m256i first = _mm256_loadu_si256((const __m256i *)from);
    const __m256i second = _mm256_loadu_si256((const __m256i *)(from + 32));
    if (streamed) {
        _mm256_stream_si256((__m256i *)to, first);
        _mm256_stream_si256((__m256i *)(to + 32), second);
    } else {
        _mm256_storeu_si256((__m256i *)to, first);
        _mm256_storeu_si256((__m256i *)(to + 32), second);
    }
    state[0] = accumulated(state[0], first, secret);
    state[1] = accumulated(state[1], second, secret + 32);
}

static inline uint64_t word(const uint8_t *at)
{
    uint64_t value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t merged(const uint64_t lanes[8], uint64_t length)
{
    uint64_t sum = length * PRIME64_1;
    for (int pair = 0; pair < 4; pair++) {
        const uint8_t *secret = SECRET + 11 + 16 * pair;
        const unsigned __int128 product =
            (unsigned __int128)(lanes[2 * pair] ^ word(secret)) * (lanes[2 * pair + 1] ^ word(secret + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= PRIME_MX1;
    return sum ^ (sum >> 32);
}

AVX2 static inline uint64_t copied(uint8_t *to, const uint8_t *from, size_t length, int streamed)
{
    uint64_t lanes[8] __attribute__((aligned(32))) = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    __m256i state[2] = {_mm256_load_si256((const __m256i *)lanes), _mm256_load_si256((const __m256i *)(lanes + 4))};
    const size_t blocks = (length - 1) / BLOCK;
    for (size_t block = 0; block < blocks; block++, from += BLOCK, to += BLOCK) {
        for (int number = 0; number < STRIPES; number++) {
            _mm_prefetch((const char *)from + AHEAD + STRIPE * number, _MM_HINT_T0);
            stripe(state, to + STRIPE * number, from + STRIPE * number, SECRET + 8 * number, streamed);
        }
        state[0] = scrambled(state[0], SECRET + SECRET_BYTES - STRIPE);
        state[1] = scrambled(state[1], SECRET + SECRET_BYTES - STRIPE + 32);
    }
    const size_t rest = length - blocks * BLOCK;
    const int stripes = (int)((rest - 1) / STRIPE);
    for (int number = 0; number < stripes; number++)
        stripe(state, to + STRIPE * number, from + STRIPE * number, SECRET + 8 * number, streamed);
    /* The last stripe is the last 64 bytes, which overlap the one before unless they are whole. */
    stripe(state, to + rest - STRIPE, from + rest - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7, 0);
    _mm_sfence(); /* whoever hears of the copy sees it */
    _mm256_store_si256((__m256i *)lanes, state[0]);
    _mm256_store_si256((__m256i *)(lanes + 4), state[1]);
    return merged(lanes, length);
}

AVX2 static uint64_t copied_streaming(uint8_t *to, const uint8_t *from, size_t length)
{
    return copied(to, from, length, 1);
}

AVX2 static uint64_t copied_unaligned(uint8_t *to, const uint8_t *from, size_t length)
{
    return copied(to, from, length, 0);
}

/* Whether this processor can. To be asked before the first copy. */
int roundhouse_checked_copy_works(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}

/* Copies `count` blocks of `length` bytes, which is more than 240, and writes the checksum of each. */
void roundhouse_checked_copies(uint8_t *const *to, const uint8_t *const *from, size_t count, size_t length, uint64_t *sums)
{
    for (size_t block = 0; block < count; block++)
        sums[block] = (uintptr_t)to[block] % 32 ? copied_unaligned(to[block], from[block], length)
                                                : copied_streaming(to[block], from[block], length);
}

#else

int roundhouse_checked_copy_works(void)
{
    return 0;
}

void roundhouse_checked_copies(uint8_t *const *to, const uint8_t *const *from, size_t count, size_t length, uint64_t *sums)
{
    (void)to, (void)from, (void)count, (void)length, (void)sums;
}

#endif
