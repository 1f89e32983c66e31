/* What blocks of tokens are called: BLAKE2b (RFC 7693) with 16 bytes, of the name before and the tokens. */
#include <stdint.h>
#include <string.h>

#define NAME 16

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

typedef uint64_t four __attribute__((vector_size(32)));

#define TURNED(x, bits) ((x) >> (bits) | (x) << (64 - (bits)))
#define MIX(x, y)                                                                                            \
  a += b + (x), d = TURNED(d ^ a, 32), c += d, b = TURNED(b ^ c, 24);                                        \
  a += b + (y), d = TURNED(d ^ a, 16), c += d, b = TURNED(b ^ c, 63)
#define WORDS(i) (four){m[s[i]], m[s[i + 2]], m[s[i + 4]], m[s[i + 6]]}
#define ROLL(x, n) __builtin_shuffle(x, (four){n, n + 1, n + 2, n + 3} & 3)

/* `count`: bytes so far, with those of this part. Words are little-endian, as is every processor that this is for. */
static void compress(uint64_t h[8], const uint8_t part[128], uint64_t count, int last) {
  uint64_t m[16];
  four a, b, c, d, low, high;
  memcpy(m, part, sizeof m), memcpy(&low, h, 32), memcpy(&high, h + 4, 32);
  memcpy(&c, IV, 32), memcpy(&d, IV + 4, 32);
  a = low, b = high, d ^= (four){count, 0, last ? ~0ul : 0, 0};
  for (int round = 0; round < 12; round++) {
    const uint8_t *s = SIGMA[round % 10];
    MIX(WORDS(0), WORDS(1));
    b = ROLL(b, 1), c = ROLL(c, 2), d = ROLL(d, 3);
    MIX(WORDS(8), WORDS(9));
    b = ROLL(b, 3), c = ROLL(c, 2), d = ROLL(d, 1);
  }
  low ^= a ^ c, high ^= b ^ d;
  memcpy(h, &low, 32), memcpy(h + 4, &high, 32);
}

/* head (num_head) and body (num_body): bytes. digest (NAME) is written. */
static void blake2b(const uint8_t *head, uint64_t num_head, const uint8_t *body, uint64_t num_body, uint8_t *digest) {
  uint64_t h[8], count = num_head + num_body, done = 0;
  uint8_t part[128] = {0};
  memcpy(h, IV, sizeof h), memcpy(part, head, num_head);
  h[0] ^= 0x01010000 ^ NAME;
  for (uint64_t filled = num_head;; filled = 0) {
    uint64_t taken = num_body < 128 - filled ? num_body : 128 - filled;
    memset(part + filled, 0, 128 - filled), memcpy(part + filled, body, taken);
    body += taken, num_body -= taken, done += filled + taken;
    compress(h, part, done, done == count);
    if (done == count) break;
  }
  memcpy(digest, h, NAME);
}

/* What blocks `first` to `end` - 1 of these tokens are called: names (end - first), `stride` bytes apart. before: the name of
   the block before them; for the first it is not read. */
void name_blocks(const int32_t *ids, int64_t first, int64_t end, int64_t size, const uint8_t *before, uint8_t *names,
                 int64_t stride) {
  for (int64_t block = first; block < end; block++, names += stride) {
    blake2b(before, block ? NAME : 0, (const uint8_t *)(ids + block * size), 4 * size, names);
    before = names;
  }
}

/* book: addresses of tokens (rows of the table, length), of latest (rows of the table, NAME), the name of the last block of
   each row that has one, and of num_named: how many have; the length, tokens of a block, and `ahead`: whether a name is
   followed by the token behind its block; address of a table of blocks, or 0, and its columns; room, and addresses of names
   (room, NAME + 4 * ahead), of blocks (room) and of behind (n).
   rows and after (n): rows of the table, and tokens that each has in the caches. Blocks that are full by now and have no
   name get one; to blocks are written their entries of the table, to behind how many names come before the first block of a
   row, were all of its blocks among them. Returns how many names there are, which may be more than there is room for: then
   nothing was done; or below 0 for a row that does not have so many tokens. */
int64_t name_rows(const int64_t *book, const int64_t *rows, const int32_t *after, int64_t n) {
  const int32_t *ids = (const int32_t *)book[0], *table = (const int32_t *)book[6];
  uint8_t *latest = (uint8_t *)book[1], *names = (uint8_t *)book[9];
  int32_t *num_named = (int32_t *)book[2];
  int64_t length = book[3], size = book[4], ahead = book[5], columns = book[7], room = book[8];
  int64_t *blocks = (int64_t *)book[10], *behind = (int64_t *)book[11], stride = NAME + 4 * ahead, count = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t full = num_named[rows[i]];
    if (after[i] < (full + 1) * size) continue;
    int64_t end = after[i] / size;
    if (end * size + ahead > length) return -1 - i;
    count += end - full;
  }
  if (count > room) return count;
  count = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t row = rows[i], first = num_named[row];
    if (after[i] < (first + 1) * size) continue;
    int64_t end = after[i] / size;
    const int32_t *own = ids + row * length;
    uint8_t *mine = names + count * stride;
    name_blocks(own, first, end, size, latest + row * NAME, mine, stride);
    memcpy(latest + row * NAME, mine + (end - 1 - first) * stride, NAME);
    behind[i] = count - first, num_named[row] = (int32_t)end;
    for (int64_t block = first; block < end; block++, count++) {
      blocks[count] = table ? table[row * columns + block] : 0;
      if (ahead) memcpy(names + count * stride + NAME, own + (block + 1) * size, 4);
    }
  }
  return count;
}
