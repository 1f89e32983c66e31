/* Where the tokens of a step are stored, see `StepValues`, and what is new in a table, see `BlockTable`. */
#include <stdint.h>

/* ids: the block table, `columns` wide. rows and before (n): rows of the table, and tokens of each before the step; starts
   (n + 1): its first token of the step. positions and slots (tokens of the step) are written. Returns the number of
   tokens, or the first whose row has no block for it. */
int64_t place_rows(const int32_t *ids, int64_t columns, int64_t block_size, const int64_t *rows, const int32_t *before,
                   const int32_t *starts, int64_t n, int32_t *positions, int64_t *slots) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t *own = ids + rows[i] * columns;
    int64_t position = before[i], column = position / block_size, offset = position % block_size;
    for (int64_t token = starts[i]; token < starts[i + 1]; token++, position++, offset++) {
      if (offset == block_size) column++, offset = 0;
      if (column >= columns || own[column] <= 0) return token;
      positions[token] = (int32_t)position;
      slots[token] = own[column] * block_size + offset;
    }
  }
  return starts[n];
}

/* All that is new in a step of rows (n) of the table, with lens (n) tokens each behind computed (n). book: the longest that a
   row may be; addresses of seq_lens, num_computed_tokens and the bound (n each), of positions and input_ids (tokens of the
   step), which are written; how many groups have slots, and of each the address of its block table, the columns, tokens of
   a block, and the address of its slots (tokens of the step), which are written, too. sampled: ids of all tokens. Returns
   the length of the longest row behind the step, or 0 before anything is written: a row can't have so many tokens, or lacks
   a block. */
int64_t stage_rows(const int64_t *book, const int64_t *rows, const int32_t *lens, const int32_t *computed, int64_t n,
                   const int64_t *sampled) {
  int32_t *seq_lens = (int32_t *)book[1], *before = (int32_t *)book[2], *upper = (int32_t *)book[3];
  int32_t *ids = (int32_t *)book[5];
  int64_t *positions = (int64_t *)book[4], num_groups = book[6], longest = 0, token = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t end = (int64_t)computed[i] + lens[i];
    if (computed[i] < 0 || end > book[0]) return 0;
    if (end > longest) longest = end;
  }
  for (const int64_t *group = book + 7; group < book + 7 + 4 * num_groups; group += 4) {
    uint32_t size = (uint32_t)group[2];
    for (int64_t i = 0; i < n; i++) {
      const int32_t *own = (const int32_t *)group[0] + rows[i] * group[1];
      int64_t column = (uint32_t)computed[i] / size, end = computed[i] + lens[i];
      for (; column * size < end; column++)
        if (column >= group[1] || own[column] <= 0) return 0;
    }
  }
  for (int64_t i = 0; i < n; i++) {
    seq_lens[i] = upper[i] = computed[i] + lens[i], before[i] = computed[i];
    for (int64_t position = computed[i]; position < upper[i]; position++) positions[token++] = position;
  }
  for (int64_t i = 0; i < token; i++) ids[i] = (int32_t)sampled[i];
  for (const int64_t *group = book + 7; group < book + 7 + 4 * num_groups; group += 4) {
    int64_t *slots = (int64_t *)group[3];
    uint32_t size = (uint32_t)group[2];
    for (int64_t i = 0; i < n; i++) {
      uint32_t column = (uint32_t)computed[i] / size, offset = computed[i] - column * size;
      const int32_t *own = (const int32_t *)group[0] + rows[i] * group[1] + column;
      for (int32_t j = 0; j < lens[i]; j++, offset++) {
        if (offset == size) own++, offset = 0;
        *slots++ = *own * (int64_t)size + offset;
      }
    }
  }
  return longest;
}

/* ids: a table of `columns`. place: by row of the table, its row of `out`, which is as wide, or below 0. cells (n): entries
   that were written, which are copied where their row has a place. left (1 + n): the entries without a place, behind one
   more than the last column of all. Returns how many these are. */
int64_t follow_cells(const int32_t *ids, const int64_t *place, int32_t *out, int64_t columns, const int64_t *cells,
                     int64_t n, int64_t *left) {
  int64_t num_left = 0, width = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t row = cells[i] / columns, column = cells[i] % columns;
    if (column >= width) width = column + 1;
    if (place[row] < 0) left[1 + num_left++] = cells[i];
    else out[place[row] * columns + column] = ids[cells[i]];
  }
  left[0] = width;
  return num_left;
}
