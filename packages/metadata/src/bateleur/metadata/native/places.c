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

/* cells (n): entries of ids, a table of `columns`, that were written. place: by row of the table, its row of `out`, which
   is as wide, or below 0: the entries of all others are written there. left (1 + n): the entries without a place, behind one
   more than the last column of all. Returns how many these are. */
int64_t follow_cells(const int64_t *cells, int64_t n, const int32_t *ids, int64_t columns, const int64_t *place,
                     int32_t *out, int64_t *left) {
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
