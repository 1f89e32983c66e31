/* What a step takes of rows of the request table, and what it did to them. */
#include <stdint.h>

#define AHEAD 8 /* rows, each in a line of memory of its own, that are fetched before their turn */

/* book, here and below: addresses of the table's token_ids and drafted (rows of the table, length), and of num_known,
   num_settled, num_computed, num_tokens, slack, num_places and num_blocks; then the length, the columns of the flat block
   table, room, and addresses of cells (room), short_rows (n), counts (n) and totals (3).
   rows (n): those that decode. lens (n): what their places are taken for, or null. size: tokens of a block, 0 where there
   are none; ahead: tokens behind those of the step that have a block, too. To cells are written the entries of the block
   table that lack a block, row by row, to short_rows and counts whose they are; to totals tokens of the step, whether lens
   are right, and of how many rows there are cells. Returns how many cells, or -1 if there are more than fit. */
int64_t cover_rows(const int64_t *book, const int64_t *rows, const int32_t *lens, int64_t n, int64_t size,
                   int64_t ahead) {
  int64_t longest = book[9], columns = book[10], room = book[11];
  int64_t *cells = (int64_t *)book[12], *short_rows = (int64_t *)book[13], *totals = (int64_t *)book[15];
  int32_t *counts = (int32_t *)book[14];
  const int32_t *computed = (const int32_t *)book[4], *places = (const int32_t *)book[7];
  const int32_t *num_blocks = (const int32_t *)book[8];
  int64_t num_cells = 0, num_short = 0, num_tokens = 0, same = lens != 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t row = rows[i], len = 1 + places[row], stored = computed[row] + len + ahead, held = num_blocks[row];
    num_tokens += len;
    if (lens) same &= len == lens[i];
    if (stored > longest) stored = longest;
    if (stored <= held * size || !size) continue;
    int64_t count = (stored + size - 1) / size - held;
    if (num_cells + count > room) return -1;
    for (int64_t j = 0; j < count; j++) cells[num_cells++] = row * columns + held + j;
    short_rows[num_short] = row, counts[num_short++] = (int32_t)count;
  }
  totals[0] = num_tokens, totals[1] = same, totals[2] = num_short;
  return num_cells;
}

/* The next step of rows (n) tests drafts (n). book also has addresses of the table's limit and num_drafts behind what is
   said above. Returns 1, or 0 before anything is written if less than `most` may be of use to one before its end. */
int64_t assign_rows(const int64_t *book, const int64_t *rows, const int32_t *drafts, int64_t n, int64_t most) {
  const int32_t *num_tokens = (const int32_t *)book[5], *limit = (const int32_t *)book[16];
  int32_t *num_places = (int32_t *)book[7], *num_drafts = (int32_t *)book[17];
  for (int64_t i = 0; i < n; i++)
    if (limit[rows[i]] - num_tokens[rows[i]] <= most) return 0;
  for (int64_t i = 0; i < n; i++) num_drafts[rows[i]] = num_places[rows[i]] = drafts[i];
  return 1;
}

/* To useful (n) is written how many drafts, at most `most`, can be of use behind the known tokens of rows (n) that end at
   their limit or at `longest`: behind those that are known by the bounds or, if `least`, behind the one that a step emits
   at least of those that are known in any case. */
void useful_rows(const int64_t *book, const int64_t *rows, int32_t *useful, int64_t n, int64_t longest, int64_t most,
                 int64_t least) {
  const int32_t *num_tokens = (const int32_t *)book[5], *slack = (const int32_t *)book[6];
  const int32_t *limit = (const int32_t *)book[16];
  for (int64_t i = 0; i < n; i++) {
    int64_t row = rows[i], end = limit[row] - 1 < longest ? limit[row] - 1 : longest;
    int64_t left = end - num_tokens[row] + (least ? slack[row] - 1 : 0);
    useful[i] = (int32_t)(left < 0 ? 0 : left > most ? most : left);
  }
}

/* rows and lens (n): those of a step that was launched, of which the first `num_decodes` are past their prompts. */
void advance_rows(const int64_t *book, const int64_t *rows, const int32_t *lens, int64_t n, int64_t num_decodes) {
  int32_t *computed = (int32_t *)book[4], *num_tokens = (int32_t *)book[5], *slack = (int32_t *)book[6];
  for (int64_t i = 0; i < n; i++) {
    int32_t row = (int32_t)rows[i], known = (computed[row] += lens[i]) + 1;
    if (num_decodes == n || known > num_tokens[row]) num_tokens[row] = known;
    if (i < num_decodes) slack[row] += lens[i] - 1;
  }
}

/* rows and lens (n): rows of the table, all different, and tokens that the step computed for each. tokens (n, ...), with a
   stride, and counts (n): of each, the first so many are known from now on. book also has addresses of before and after (n)
   behind all that is said above: what was settled is written there. Returns n, or the first row whose tokens would leave it
   or are more than were computed, before anything is written. */
int64_t settle_rows(const int64_t *book, const int64_t *rows, const int32_t *lens, const int64_t *tokens,
                    int64_t stride, const int64_t *counts, int64_t n) {
  int64_t length = book[9];
  int32_t *before = (int32_t *)book[18], *after = (int32_t *)book[19];
  int32_t *ids = (int32_t *)book[0], *known = (int32_t *)book[2], *settled = (int32_t *)book[3];
  int32_t *computed = (int32_t *)book[4], *num_tokens = (int32_t *)book[5], *slack = (int32_t *)book[6];
  uint8_t *drafted = (uint8_t *)book[1];
  for (int64_t i = 0; i < n; i++) {
    int64_t count = counts[i];
    if (count < 0 || count > lens[i] || known[rows[i]] + count > length) return i;
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t row = rows[i], count = counts[i], at = row * length + known[row];
    if (i + AHEAD < n) {
      int64_t next = rows[i + AHEAD] * length + known[rows[i + AHEAD]];
      __builtin_prefetch(ids + next, 1), __builtin_prefetch(drafted + next, 1);
    }
    for (int64_t j = 0; j < count; j++) {
      ids[at + j] = (int32_t)tokens[i * stride + j];
      drafted[at + j] = j < count - 1;
    }
    known[row] += count;
    before[i] = settled[row];
    after[i] = settled[row] += count;
    computed[row] -= lens[i] - count, num_tokens[row] -= lens[i] - count;
    slack[row] -= lens[i] - 1;
  }
  return n;
}

/* book: addresses of the table's num_known and watched_from; of stops: by token whether it may end a request, and of how
   many tokens it says so; room, and addresses of told (3, room) and looked (n). packed (n, width): of each of the rows (n)
   of the table how many tokens were emitted, whether its logits were bad, the tokens, at most `most` and below 0 behind the
   last, and drafts, -1 where there is none. To told are written tokens that were emitted, drafts before the first that is
   none, and drafts that were accepted, n each; to looked rows, by number, which may take other tokens than these or do
   more with them. Returns how many they are. */
int64_t read_rows(const int64_t *book, const int64_t *rows, const int64_t *packed, int64_t width, int64_t most,
                  int64_t n) {
  const uint8_t *stops = (const uint8_t *)book[2];
  int64_t size = book[3], room = book[4], *told = (int64_t *)book[5], *looked = (int64_t *)book[6];
  const int32_t *known = (const int32_t *)book[0], *watched_from = (const int32_t *)book[1];
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t *own = packed + i * width, *tokens = own + 2, *drafts = tokens + most;
    int64_t count = own[0], drafted = 0;
    int look = own[1] > 0 || known[rows[i]] + count >= watched_from[rows[i]];
    for (int64_t j = 0; j < most; j++) look |= tokens[j] >= 0 && (tokens[j] >= size || stops[tokens[j]]);
    while (drafted < width - 2 - most && drafts[drafted] >= 0) drafted++;
    if (look) looked[found++] = i;
    told[i] = count, told[room + i] = drafted, told[2 * room + i] = count > 0 ? count - 1 : 0;
  }
  return found;
}
