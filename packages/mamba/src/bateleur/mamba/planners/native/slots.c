/* Slots of a step under SLOTS, and what follows acceptance; see `bateleur.mamba.planners.plan_step` and `plan_copy`.

   table (n, columns) with a stride; computed (n) and starts (n + 1). A block ends after `block_size` tokens, or never
   before the request does where that is 0, so that all states lie in the first columns. states (3, num_states):
   accepted, prev_col and base, of which a row has those of request_row. Both return n, or the first row that names what
   there is not, or is longer than `longest`; what they are to write is then undefined, and no state is written. */
#include <stdint.h>

typedef struct {
  const int32_t *table, *computed, *starts;
  int64_t stride, columns, n, block_size, longest, num_states, *states;
} rows;

static int64_t held(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

/* owners (n) with a stride: rows of states, which are written to request_row, too. ssm_write (n, width), others (n). */
int64_t step_rows(const rows *s, const int32_t *owners, int64_t owners_stride, int64_t *request_row, int64_t width,
                  int64_t *ssm_read, int64_t *ssm_write, int64_t *conv_read, int64_t *conv_offset, int64_t *conv_write,
                  int64_t *run_col) {
  for (int64_t i = 0; i < s->n; i++, ssm_write += width) {
    int64_t row = owners[i * owners_stride], len = s->starts[i + 1] - s->starts[i], before = len > 0 ? s->computed[i] : 0;
    if (row < 0 || row >= s->num_states || len < 0 || before < 0 || before + len > s->longest) return i;
    const int32_t *own = s->table + i * s->stride;
    int64_t offset = before ? held(s->states[row], 1, width) - 1 : 0, anchor = 0, run = 0;
    if (s->block_size) {
      int64_t last = s->states[s->num_states + row];
      run = len ? (before + len - 1) / s->block_size : 0;
      anchor = before ? (before - 1) / s->block_size : 0;
      if (before && last > anchor) anchor = last;
    }
    if (run + width > s->columns || anchor + offset >= s->columns) return i;
    request_row[i] = row;
    conv_offset[i] = offset, run_col[i] = run;
    conv_read[i] = before ? own[anchor] : 0;
    ssm_read[i] = before ? own[anchor + offset] : 0;
    for (int64_t j = 0; j < width; j++) ssm_write[j] = j < len ? own[run + j] : 0;
    conv_write[i] = ssm_write[0];
  }
  return s->n;
}

/* Of the first `decodes` rows tokens behind the first are drafts. accepted, request_row and run_col (n), and the rest,
   which is written: copies, and then `kept` and prev_col, which also go to the states; row 0 of these stays neutral. */
int64_t copy_rows(const rows *s, int64_t decodes, const int64_t *accepted, const int64_t *request_row,
                  const int64_t *run_col, int64_t *conv_src, int64_t *conv_bias, int64_t *ssm_src, int64_t *dst,
                  int64_t *kept, int64_t *prev_col) {
  int64_t size = s->block_size;
  for (int64_t i = 0; i < s->n; i++) {
    int64_t len = s->starts[i + 1] - s->starts[i], drafts = i < decodes && len > 0 ? len - 1 : 0;
    int64_t extra = held(accepted[i], 1, 1 + drafts) - 1, run = size ? run_col[i] : 0;
    if (request_row[i] < 0 || request_row[i] >= s->num_states || len < 0) return i;
    conv_src[i] = conv_bias[i] = ssm_src[i] = dst[i] = 0;
    kept[i] = extra + 1, prev_col[i] = run;
    if (!size || !len) continue;
    int64_t end = s->computed[i] + len - drafts + extra, bias = extra - end % size, home = end / size - 1;
    if (bias < 0) continue; /* no boundary among the tokens that stay */
    if (home == run) kept[i] = 1;
    if (home == run && !bias) continue; /* it is in its place */
    if (home < 0 || home >= s->columns || run < 0 || run + bias >= s->columns) return i;
    const int32_t *own = s->table + i * s->stride;
    conv_bias[i] = bias, conv_src[i] = own[run], ssm_src[i] = own[run + bias], dst[i] = own[home];
  }
  for (int64_t i = 0; i < s->n; i++)
    s->states[request_row[i]] = kept[i], s->states[s->num_states + request_row[i]] = prev_col[i];
  s->states[0] = 1, s->states[s->num_states] = -1, s->states[2 * s->num_states] = 0;
  return s->n;
}
