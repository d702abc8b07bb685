/* Decoding on a CPU: select, attend over the pages in place, combine.  Called by decode.py,
 * which documents the arguments.  Sums and weights are float32. */

#include "choose.h"

#define CELL (SEGMENT / VECTORS) /* tokens that are chosen together */
#define BLOCK SEGMENT            /* tokens that are counted together where none are chosen */
#define RUN 128                  /* keys that are attended together */
#define CELL_MASK ((1 << CELL_BITS) - 1)
#define STEP (0.693147181f / STEPS) /* of a weight's natural logarithm */

/* Tokens of a block: a cell's, or more where none are chosen. */
ALWAYS_INLINE int64_t block_tokens(const Token *token) { return token->picks ? CELL : BLOCK; }

/* The first block of the first token's own segment, or of the window where nothing is chosen. */
ALWAYS_INLINE int64_t first_own(const Token *token) {
    return token->picks ? token->position / SEGMENT * VECTORS : token->local;
}

/* Blocks that are attended in the first pass: of sinks and own segment, or window. */
ALWAYS_INLINE int64_t num_exact(const Token *token) {
    const int64_t end = token->position / block_tokens(token) + 1;
    return token->front + max64(end - first_own(token), 0);
}

/* Blocks of the window that are attended in the second one, before those that are chosen. */
ALWAYS_INLINE int64_t num_window(const Token *token) { return first_own(token) - token->local; }

/* Where a piece is in its pass's list of blocks: an entry, and keys of it that are done.  The list
 * is `near` blocks from `first` on, then those from `second` on, or in the second pass the chosen
 * ones.  After them it has the keys of the unit's tokens from `later` on. */
typedef struct {
    const int32_t *chosen;
    int64_t near, first, second, entry, last, done, later;
} Cursor;

/* An entry of a pass's list: a block, and steps of the log of its weight. */
ALWAYS_INLINE int32_t entry_at(const Cursor *at) {
    const int64_t rest = at->entry - at->near;
    if (rest < 0) return (int32_t)(at->first + at->entry);
    return at->chosen ? at->chosen[rest] : (int32_t)(at->second + rest);
}

/* Rows of keys that are attended together, and logarithms of their weights; behind them the last
 * one again.  The unit's rows from `from` on attend them. */
typedef struct {
    int64_t count, from;
    const char *k[RUN], *v[RUN];
    float weights[RUN];
} Run;

ALWAYS_INLINE const char *row_of(const Decode *a, const Rows *rows, int64_t page, int64_t unit,
                                 int64_t offset) {
    return rows->data + (page * rows->page + unit % a->heads * rows->head + offset * rows->row) *
                            (rows->is_bf16 ? 2 : 4);
}

/* The next keys of a piece, up to the unit's first token or one of a later one; none at its end. */
static void next_run(const Decode *a, const Token *token, int64_t unit, Cursor *at, Run *run) {
    const int64_t size = block_tokens(token), bytes = a->k.is_bf16 ? 2 : 4;
    const int32_t *pages = a->table + token->request * a->table_stride;
    int64_t count = 0;
    while (at->entry < at->last && count < RUN) {
        const int32_t entry = entry_at(at);
        const int64_t block = entry & CELL_MASK, key = block * size + at->done;
        const int64_t end = min64((block + 1) * size, token->position + 1);
        const int64_t page = (int32_t)key / (int32_t)a->page_size; /* 32 bits divide faster */
        const int64_t offset = key - page * a->page_size;
        int64_t keys = min64(min64(RUN - count, end - key), a->page_size - offset);
        if (token->sinks_end <= key && key < token->window_start) { /* between: not seen */
            keys = min64(token->window_start, end) - key;
        } else {
            if (key < token->sinks_end && token->sinks_end < token->window_start)
                keys = min64(keys, token->sinks_end - key);
            const char *k = row_of(a, &a->k, pages[page], unit, offset);
            const char *v = row_of(a, &a->v, pages[page], unit, offset);
            const float weight = (float)(entry >> CELL_BITS) * STEP;
            for (int64_t j = 0; j < keys; j++) {
                run->k[count + j] = k + j * a->k.row * bytes;
                run->v[count + j] = v + j * a->v.row * bytes;
                run->weights[count + j] = weight;
            }
            count += keys;
        }
        at->done += keys;
        if (key + keys == end) at->entry++, at->done = 0;
    }
    run->from = 0;
    if (!count && at->later < token->count) { /* no token before this one sees its key */
        const int64_t key = token->position + at->later, page = key / a->page_size;
        run->k[0] = row_of(a, &a->k, pages[page], unit, key % a->page_size);
        run->v[0] = row_of(a, &a->v, pages[page], unit, key % a->page_size);
        run->weights[0] = 0.0f;
        run->from = at->later++ * a->group;
        count = 1;
    }
    run->count = count;
    for (; count && count < RUN; count++) {
        run->k[count] = run->k[count - 1];
        run->v[count] = run->v[count - 1];
        run->weights[count] = run->weights[count - 1];
    }
}

/* Adds the products of `count` channels of four rows with up to four query heads. */
ALWAYS_INLINE void multiply(const char *const rows[4], int is_bf16, const Chunk *q, int64_t chunks,
                            int heads, int64_t channel, int64_t count, Wide sums[4][4]) {
    for (int j = 0; j < 4; j++) {
        const Chunk k = load_factors(rows[j], is_bf16, channel, count);
        for (int g = 0; g < heads; g++)
            sums[g][j] = add_products(sums[g][j], q[g * chunks], k, is_bf16);
    }
}

/* Logits of a run's keys for up to four query heads. */
ALWAYS_INLINE void logits_of(const Run *run, const Run *ahead, int is_bf16, const Chunk *q,
                             int heads, float scale, float *logits, int dim) {
    const int chunks = (dim + CHUNK - 1) / CHUNK;
    for (int64_t first = 0; first < run->count; first += LANES) {
        Lanes sums[4][LANES];
        for (int j = 0; j < LANES; j += 4) {
            const char *const *rows = run->k + first + j;
            Wide wide[4][4] = {{{0}}};
            int c = 0;
            for (; (c + 1) * CHUNK <= dim; c++)
                multiply(rows, is_bf16, q + c, chunks, heads, c * CHUNK, CHUNK, wide);
            if (dim % CHUNK)
                multiply(rows, is_bf16, q + c, chunks, heads, c * CHUNK, dim % CHUNK, wide);
            for (int i = 0; i < 4; i++) {
                ask(ahead->k[first + j + i], dim * (is_bf16 ? 2 : 4));
                for (int g = 0; g < heads; g++) sums[g][j + i] = fold(wide[g][i]);
            }
        }
        for (int g = 0; g < heads; g++) {
            Lanes found;
            memcpy(&found, run->weights + first, sizeof found);
            found += scale * sums_of(sums[g]);
            memcpy(logits + g * RUN + first, &found, sizeof found);
        }
    }
}

/* Scales `count` channels of up to four heads' sums by `keep`, and adds a run's weighted rows. */
ALWAYS_INLINE void add_channels(const Run *run, const Run *ahead, int is_bf16, const float *weights,
                                int heads, const float *keep, float *sums, int64_t width,
                                int64_t channel, int64_t count) {
    const int64_t bytes = is_bf16 ? 2 : 4;
    Wide x[4], y[4];
    for (int g = 0; g < heads; g++) {
        memcpy(&x[g], sums + g * width + channel, sizeof *x);
        memcpy(&y[g], sums + g * width + channel + WIDE, sizeof *y);
        x[g] *= keep[g];
        y[g] *= keep[g];
    }
    for (int64_t j = 0; j < run->count; j++) {
        const Chunk v = load_chunk(run->v[j], is_bf16, channel, count);
        ask(ahead->v[j] + channel * bytes, count * bytes);
        for (int g = 0; g < heads; g++) {
            x[g] += weights[g * RUN + j] * v.x;
            y[g] += weights[g * RUN + j] * v.y;
        }
    }
    for (int g = 0; g < heads; g++) {
        memcpy(sums + g * width + channel, &x[g], sizeof *x);
        memcpy(sums + g * width + channel + WIDE, &y[g], sizeof *y);
    }
}

/* Online softmax over a run's keys, for up to four query heads. */
ALWAYS_INLINE void attend_run(const Run *run, const Run *ahead, int is_bf16, const Chunk *q,
                              int heads, float scale, float *part, int64_t width, int dim) {
    float weights[4][RUN], keep[4];
    logits_of(run, ahead, is_bf16, q, heads, scale, weights[0], dim);
    for (int g = 0; g < heads; g++) {
        float *state = state_of(part + g * width, dim), *weight = weights[g];
        float top = state[0], total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < run->count; j++) top = weight[j] > top ? weight[j] : top;
        keep[g] = top > state[0] ? expf(state[0] - top) : 1.0f;
        exp_in_place(weight, run->count, top);
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < run->count; j++) total += weight[j];
        state[0] = top;
        state[1] = state[1] * keep[g] + total;
    }
    int d = 0;
    for (; d + CHUNK <= dim; d += CHUNK)
        add_channels(run, ahead, is_bf16, weights[0], heads, keep, part, width, d, CHUNK);
    if (dim % CHUNK)
        add_channels(run, ahead, is_bf16, weights[0], heads, keep, part, width, d, dim % CHUNK);
}

/* Adds the blocks of a list to a piece's part. */
ALWAYS_INLINE void attend_blocks(const Decode *a, const Token *token, int64_t unit, Cursor at,
                                 float *part, int dim) {
    const int64_t rows = rows_of(a, unit), width = PART(dim), chunks = (dim + CHUNK - 1) / CHUNK;
    Chunk q[MOST_ROWS * ((MOST_DIM + CHUNK - 1) / CHUNK)];
    Run runs[2], *run = runs, *ahead = runs + 1;
    for (int64_t g = 0; g < rows; g++) {
        const char *row = query_row(a, &a->q, unit, g);
        for (int64_t c = 0; c < chunks; c++)
            q[g * chunks + c] = load_factors(row, a->q.is_bf16, c * CHUNK, dim - c * CHUNK);
    }
    for (next_run(a, token, unit, &at, run); run->count;) {
        next_run(a, token, unit, &at, ahead);
        const Run *next = ahead->count ? ahead : run;
        for (int64_t g = run->from; g < rows; g += 4) {
            const Chunk *own = q + g * chunks;
            float *sums = part + g * width, scale = a->scale;
            switch (min64(rows - g, 4) * 2 + a->k.is_bf16) { /* constants, so that loops unroll */
            case 2: attend_run(run, next, 0, own, 1, scale, sums, width, dim); break;
            case 3: attend_run(run, next, 1, own, 1, scale, sums, width, dim); break;
            case 4: attend_run(run, next, 0, own, 2, scale, sums, width, dim); break;
            case 5: attend_run(run, next, 1, own, 2, scale, sums, width, dim); break;
            case 6: attend_run(run, next, 0, own, 3, scale, sums, width, dim); break;
            case 7: attend_run(run, next, 1, own, 3, scale, sums, width, dim); break;
            case 8: attend_run(run, next, 0, own, 4, scale, sums, width, dim); break;
            default: attend_run(run, next, 1, own, 4, scale, sums, width, dim);
            }
        }
        Run *const done = run;
        run = ahead, ahead = done;
    }
}

/* The output of a unit, from its parts. */
static void combine(const Decode *a, int64_t unit) {
    const int64_t dim = a->dim, width = PART(dim), stride = a->rows * width;
    for (int64_t g = 0; g < rows_of(a, unit); g++) {
        const float *parts = part_of(a, unit, 0, g);
        float top = -INFINITY, total = 0.0f, sums[PART(MOST_DIM)] = {0};
        if (a->sinks) top = a->sinks[unit % a->heads * a->group + g % a->group], total = 1.0f;
        for (int64_t s = 0; s < a->splits; s++) {
            const float other = parts[(s * stride) + width - 2];
            if (other > top) total *= expf(top - other), top = other;
        }
        for (int64_t s = 0; s < a->splits; s++) {
            const float *part = parts + s * stride;
            if (part[width - 1] == 0.0f) continue;
            const float weight = expf(part[width - 2] - top);
            total += weight * part[width - 1];
            for (int64_t d = 0; d < width - 2; d++) sums[d] += weight * part[d];
        }
        for (int64_t d = 0; d < dim; d += CHUNK) {
            Chunk found;
            memcpy(&found, sums + d, sizeof found);
            found.x /= total;
            found.y /= total;
            store_chunk(query_row(a, &a->out, unit, g), a->out.is_bf16, d, dim - d, found);
        }
    }
}

/* Parts of a piece to which nothing is added yet. */
ALWAYS_INLINE void clear(float *part, int64_t rows, int dim) {
    memset(part, 0, rows * PART(dim) * sizeof(float));
    for (int64_t g = 0; g < rows; g++) state_of(part + g * PART(dim), dim)[0] = -INFINITY;
}

/* Where the share of a piece in `count` things begins. */
ALWAYS_INLINE int64_t start_of(const Decode *a, int64_t split, int64_t count) {
    return count * split / a->splits;
}

/* Whether a piece is the last one of its unit's pass. */
ALWAYS_INLINE int is_last(const Decode *a, int64_t unit) {
    return !__atomic_sub_fetch(&a->units[slot_of(a, unit)].waiting, 1, __ATOMIC_ACQ_REL);
}

/* Scores of a piece of what lies between sinks and the first token's own segment. */
ALWAYS_INLINE void score_piece(const Decode *a, const Token *token, int64_t unit, int64_t split,
                               int dim) {
    const int64_t first = token->front / VECTORS, count = token->position / SEGMENT - first;
    score_records(a, token, unit, first + start_of(a, split, count),
                  first + start_of(a, split + 1, count), dim);
}

static void choose(const Decode *a, const Token *token, int64_t unit) {
    choose_cells(a, token, unit);
    a->units[slot_of(a, unit)].waiting = (int32_t)a->splits;
}

/* A first pass attends sinks and the token's own segment, and scores what lies between them; a
 * second one attends the window before that segment, and the sample of what lies before it.  Where
 * nothing is chosen the first one attends all.  The last piece of a unit chooses, or combines. */
ALWAYS_INLINE void do_piece(const Decode *a, int pass, int64_t piece, int dim) {
    const int64_t unit = piece / a->splits, split = piece % a->splits;
    const Token *token = token_of(a, unit);
    if (pass && !token->picks) return;
    float *part = part_of(a, unit, split, 0);
    if (!pass) clear(part, rows_of(a, unit), dim);
    const int32_t *chosen = pass ? chosen_of(a, unit) : NULL;
    const int64_t count =
        pass ? num_window(token) + a->units[slot_of(a, unit)].chosen : num_exact(token);
    const int64_t later = pass || split < a->splits - 1 ? token->count : 1;
    const int64_t first = start_of(a, split, count), last = start_of(a, split + 1, count);
    const Cursor at = {.chosen = chosen,
                       .near = pass ? num_window(token) : token->front,
                       .first = pass ? token->local : 0,
                       .second = first_own(token),
                       .entry = first,
                       .last = last,
                       .later = later};
    attend_blocks(a, token, unit, at, part, dim);
    if (token->picks && !pass) score_piece(a, token, unit, split, dim);
    if (!is_last(a, unit)) return;
    if (token->picks && !pass) choose(a, token, unit);
    else combine(a, unit);
}

/* The common head dimensions as constants, so that loops unroll. */
static void do_piece_of(const Decode *a, int pass, int64_t piece) {
    switch (a->dim) {
    case 64: do_piece(a, pass, piece, 64); break;
    case 128: do_piece(a, pass, piece, 128); break;
    default: do_piece(a, pass, piece, (int)a->dim);
    }
}

/* Pieces are dealt out as threads come for them: other work may hold one of them up. */
void sparsek_decode(const Decode *a) {
    const int64_t units = a->lists * a->heads, pieces = units * a->splits;
    const int passes = a->max_picks ? 2 : 1;
    if (a->splits == 1) {
#pragma omp parallel for num_threads(a->threads) schedule(dynamic, 1)
        for (int64_t unit = 0; unit < units; unit++) {
            a->units[slot_of(a, unit)] = (Unit){0, 1};
            for (int pass = 0; pass < passes; pass++) do_piece_of(a, pass, unit);
        }
        return;
    }
    for (int64_t unit = 0; unit < units; unit++) a->units[unit] = (Unit){0, (int32_t)a->splits};
#pragma omp parallel num_threads(a->threads)
    for (int pass = 0; pass < passes; pass++) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < pieces; piece++) do_piece_of(a, pass, piece);
    }
}
