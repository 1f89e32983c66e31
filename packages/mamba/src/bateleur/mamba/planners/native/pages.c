/* Which state pages rows get, publish and give up; see `bateleur.mamba.StatePages`. */
#include <stdint.h>

static int64_t before_last(int64_t tokens, int64_t size) { return tokens > 0 ? (tokens - 1) / size : 0; }

/* The first column that a later step may read. */
static int64_t oldest(int64_t tokens, int64_t size, int64_t folds, int in_prompt) {
  if (!folds || in_prompt) return before_last(tokens, size);
  return tokens / size > 0 ? tokens / size - 1 : 0;
}

/* book, here and below: address of the table (rows, columns) and its columns; address of covered: by row of the table,
   tokens up to which it has pages; tokens of a page; how many columns a step may write; whether the policy is FOLD; then
   addresses of lasting: by column, whether it is kept for good, and of newest: by row of the table, the page that it
   published last; whether the last boundary and that of the prompt are kept; room; and addresses of left (room), dropped
   (n, 4), kept (room, 4), next (n) and counts (3); address of due: by row of the table, computed tokens until there is more
   to do.
   rows, computed, lens and slack (n, slack or null): see `StatePages.cover`. To left are written entries of the flat table
   that lack a page. Returns how many, or -1 if there are more than fit. */
int64_t cover_pages(const int64_t *book, const int64_t *rows, const int32_t *computed, const int32_t *lens,
                    const int32_t *slack, int64_t n) {
  const int32_t *table = (const int32_t *)book[0];
  int64_t columns = book[1], *covered = (int64_t *)book[2], size = book[3], most = book[4], folds = book[5];
  int64_t room = book[10], *cells = (int64_t *)book[11];
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

/* rows, before, after and prompts (n): see `StatePages.commit`; only rows with as many tokens as are due are looked at. To
   dropped and kept are written index, row, column and page of what need not be kept any longer, and of what is published; to
   left entries of the flat table that are given up; to due what is due next; to counts how many of the first three. Returns
   n, or before due is written the first row that has no room or fewer columns. */
int64_t turn_pages(const int64_t *book, const int64_t *rows, const int32_t *before, const int32_t *after,
                   const int32_t *prompts, int64_t n) {
  const int32_t *table = (const int32_t *)book[0];
  const uint8_t *lasting = (const uint8_t *)book[6];
  const int64_t *newest = (const int64_t *)book[7];
  int64_t columns = book[1], size = book[3], folds = book[5], last = book[8], prompt_end = book[9], room = book[10];
  int64_t *left = (int64_t *)book[11], *dropped = (int64_t *)book[12], *kept = (int64_t *)book[13];
  int64_t *next = (int64_t *)book[14], *counts = (int64_t *)book[15], *due = (int64_t *)book[16];
  int64_t num_dropped = 0, num_kept = 0, num_left = 0;
  for (int64_t i = 0; i < n; i++) {
    if (after[i] < due[rows[i]]) continue;
    const int32_t *own = table + rows[i] * columns;
    int64_t first = before[i] / size, end = after[i] / size, in_prompt = before[i] < prompts[i];
    int64_t turn = prompt_end ? (prompts[i] - 1 + size) / size - 2 : -1, page = newest[rows[i]];
    if (end > columns) return i;
    if (last && end > first && first > 0 && !lasting[first - 1] && first - 1 != turn && page) {
      int64_t *spot = dropped + 4 * num_dropped++;
      spot[0] = i, spot[1] = rows[i], spot[2] = first - 1, spot[3] = page;
    }
    for (int64_t column = first; column < end; column++) {
      if (own[column] <= 0 || !(lasting[column] || column == turn || (last && column == end - 1))) continue;
      if (num_kept == room) return i;
      int64_t *spot = kept + 4 * num_kept++;
      spot[0] = i, spot[1] = rows[i], spot[2] = column, spot[3] = own[column];
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
    next[i] = after[i] < prompts[i] ? 0 : folds || full < behind ? full : behind;
  }
  for (int64_t i = 0; i < n; i++)
    if (after[i] >= due[rows[i]]) due[rows[i]] = next[i];
  counts[0] = num_dropped, counts[1] = num_kept, counts[2] = num_left;
  return n;
}
