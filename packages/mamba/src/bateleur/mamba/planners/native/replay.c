/* Where a step finds its states under FOLD; see `bateleur.mamba.planners.plan_replay`. */
#include <stdint.h>

/* table (n, columns) with a stride; owners (n) with a stride: rows of states (3, num_states), which are accepted, prev_col
   and base. computed (n) and starts (n + 1). What follows is written, (n) each; `through`, see
   `OnTheWay`, may be NULL. Returns n, or the first row that names no row of states, or is longer than its table or than
   `longest`. */
int64_t replay_rows(const int32_t *table, int64_t stride, int64_t columns, const int32_t *owners,
                    int64_t owners_stride, const int64_t *states, int64_t num_states, const int32_t *computed,
                    const int32_t *starts, int64_t n, int64_t block_size, int64_t longest, int64_t *request_row,
                    int64_t *through, int64_t *slot, int64_t *fold_slot, int64_t *ring_start, int64_t *ring_len,
                    int64_t *offset) {
  for (int64_t i = 0; i < n; i++) {
    int64_t row = owners[i * owners_stride], len = starts[i + 1] - starts[i], before = len > 0 ? computed[i] : 0;
    if (row < 0 || row >= num_states || before + len > longest || before < 0) return i;
    int64_t base = len > 0 ? states[2 * num_states + row] : 0;
    if (base == -1) base = before; /* all tokens */
    if (before / block_size >= columns || base < 0 || base > block_size * columns) return i;
    const int32_t *own = table + i * stride;
    request_row[i] = row;
    ring_start[i] = base, ring_len[i] = before - base;
    offset[i] = len > 0 ? states[row] - 1 : 0;
    slot[i] = base ? own[(base - 1) / block_size] : 0;
    fold_slot[i] = own[before / block_size];
    if (through) through[i] = ring_len[i] + (len > 0); /* its first token is no draft */
  }
  return n;
}
