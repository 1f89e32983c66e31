/* Which state pages rows get, publish and give up; see `bateleur.mamba.StatePages`. */
#include <stdint.h>

static int64_t before_last(int64_t tokens, int64_t size) { return tokens > 0 ? (tokens - 1) / size : 0; }

/* The first column that a later step may read. */
static int64_t oldest(int64_t tokens, int64_t size, int64_t folds, int in_prompt) {
  if (!folds || in_prompt) return before_last(tokens, size);
  return tokens / size > 0 ? tokens / size - 1 : 0;
}

/* table (rows of the table, columns). rows, computed, lens and slack (n, slack or null): see `StatePages.cover`. covered:
   by row of the table, tokens up to which it has pages. most: columns that a step may write. cells (room): entries of the
   flat table that lack a page are written. Returns how many, or -1 if there are more than fit. */
int64_t cover_pages(const int32_t *table, int64_t columns, const int64_t *rows, const int32_t *computed,
                    const int32_t *lens, const int32_t *slack, int64_t n, int64_t *covered, int64_t size, int64_t most,
                    int64_t folds, int64_t *cells, int64_t room) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t row = rows[i], written = folds ? computed[i] : computed[i] + lens[i] - 1;
    int64_t many = lens[i] < most ? lens[i] : most;
    if (written + (many - 1) * size < covered[row]) continue;
    int64_t end = written / size + many;
    if (end > columns) end = columns;
    for (int64_t column = (written - (slack ? slack[i] : 0)) / size; column < end; column++) {
      if (table[row * columns + column]) continue;
      if (count == room) return -1;
      cells[count++] = row * columns + column;
    }
    covered[row] = end * size;
  }
  return count;
}

/* rows, before, after and prompts (n): see `StatePages.commit`. lasting: by column, whether it is kept for good. newest:
   by row of the table, the page that it published last. last, prompt_end and folds: flags. dropped (n, 3) and kept (room,
   3): index of the row, column and page of what need not be kept any longer, and of what is published. left (room):
   entries of the flat table that are given up. due (n): computed tokens until there is more to do. counts (3): how many
   of each. Returns n, or the first row that has no room or fewer columns. */
int64_t turn_pages(const int32_t *table, int64_t columns, const int64_t *rows, const int32_t *before,
                   const int32_t *after, const int32_t *prompts, int64_t n, const uint8_t *lasting,
                   const int64_t *newest, int64_t size, int64_t last, int64_t prompt_end, int64_t folds, int64_t room,
                   int64_t *dropped, int64_t *kept, int64_t *left, int64_t *due, int64_t *counts) {
  int64_t num_dropped = 0, num_kept = 0, num_left = 0;
  for (int64_t i = 0; i < n; i++) {
    const int32_t *own = table + rows[i] * columns;
    int64_t first = before[i] / size, end = after[i] / size, in_prompt = before[i] < prompts[i];
    int64_t turn = prompt_end ? (prompts[i] - 1 + size) / size - 2 : -1, page = newest[rows[i]];
    if (end > columns) return i;
    if (last && end > first && first > 0 && !lasting[first - 1] && first - 1 != turn && page) {
      int64_t *spot = dropped + 3 * num_dropped++;
      spot[0] = i, spot[1] = first - 1, spot[2] = page;
    }
    for (int64_t column = first; column < end; column++) {
      if (own[column] <= 0 || !(lasting[column] || column == turn || (last && column == end - 1))) continue;
      if (num_kept == room) return i;
      int64_t *spot = kept + 3 * num_kept++;
      spot[0] = i, spot[1] = column, spot[2] = own[column];
    }
    int64_t until = oldest(after[i], size, folds, in_prompt);
    if (in_prompt || until > oldest(before[i], size, folds, in_prompt)) {
      for (int64_t column = 0; column < until; column++) {
        if (!own[column]) continue;
        if (num_left == room) return i;
        left[num_left++] = rows[i] * columns + column;
      }
    }
    int64_t full = (end + 1) * size, behind = before_last(after[i], size) * size + size + 1;
    due[i] = after[i] < prompts[i] ? 0 : folds || full < behind ? full : behind;
  }
  counts[0] = num_dropped, counts[1] = num_kept, counts[2] = num_left;
  return n;
}
