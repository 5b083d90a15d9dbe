/* Models that predict: checks what an archive says, folds norms into the links before them, and plans a program of operations.

   The plan is that of fedrts.programs.plan, for evaluation: see there for how links are indexed, and kernels.h for how tensors lie. */
#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BLOCKS 4                   /* of 16 samples, whose activations are there together; more do not stay in a cache */
#define MOST_FLOATS ((int64_t)1 << 28) /* of an arena */
#define NEAR (32 * 1024)
#define WORTH_A_GROUP 4

/* What a stage gives; features have one row and one column. */
typedef struct {
    int64_t channels, height, width, wide, border;
} form;

/* A stage as it computes. */
typedef struct {
    const stored_stage *s;
    const stored_stage *links; /* those that it computes, its own or, of a norm that is folded into them, those before it */
    form form;
    int64_t source, other;     /* stages; < 0: none */
    int64_t readers, last;     /* how many stages read its value, and the last of them */
    int64_t folded;            /* links that the norm behind them computes */
    int64_t in_place;          /* links that add to the value of `other` where it lies */
    int64_t values, bias;      /* in the weights */
    int64_t vectors[4];        /* of a norm, there too; < 0: none */
} stage;

typedef struct {
    float *arena, *memory; /* arena: the first address in `memory` that a cache line begins at */
    int32_t *index;
    operation *program;
    int64_t operations;
} plan;

struct model {
    stored_model stored;
    stage *stages;
    float *weights;
    int64_t used; /* of the weights */
    plan plans[MOST_BLOCKS];
    int64_t rows[MOST_BLOCKS * LANES];
};

static int say(char *why, const char *format, ...) {
    va_list given;
    va_start(given, format);
    vsnprintf(why, ROOM_FOR_WHY, format, given);
    va_end(given);
    return 0;
}

/* ---- what the archive says, checked ---- */

static const stored_tensor *tensor_of(const model *m, const stored_stage *s, int i) {
    return s->tensors[i] < 0 ? 0 : m->stored.tensor + s->tensors[i];
}

/* A tensor of so many numbers, all of which may be there or not. */
static int has(const stored_tensor *t, int64_t size) { return !t || (t->values && t->size == size); }

static int64_t slid(int64_t size, int64_t window, int64_t stride, int64_t padding, int64_t dilation) {
    const int64_t room = size + 2 * padding - dilation * (window - 1) - 1;
    return room < 0 ? 0 : room / stride + 1;
}

static int shaped(model *m, int64_t place, char *why) {
    stage *t = m->stages + place;
    const stored_stage *s = t->s;
    const form *in = &m->stages[s->source].form;
    form *out = &t->form;
    const stored_tensor *weight = tensor_of(m, s, 0);
    *out = *in;
    out->border = 0;
    switch (s->kind) {
        case STAGE_INPUT:
            if (!s->wide && m->stored.rank != 3) return say(why, "its inputs are no images");
            *out = (form){s->wide ? m->stored.size : m->stored.shape[0], s->wide ? 1 : m->stored.shape[1], s->wide ? 1 : m->stored.shape[2],
                          s->wide, 0};
            break;
        case STAGE_LINKS: {
            const int64_t taps = s->window[0] * s->window[1];
            if (!weight->values || weight->rank < 2) return say(why, "operation %d has no weights", (int)place);
            out->channels = weight->shape[0];
            if (out->channels < 1 || out->channels % s->groups || in->channels % s->groups ||
                (double)weight->size != (double)out->channels * (double)(in->channels / s->groups) * (double)taps || !has(tensor_of(m, s, 1), out->channels))
                return say(why, "operation %d has weights of another shape", (int)place);
            if (in->wide && (taps != 1 || s->padding[0] || s->padding[1])) return say(why, "operation %d has a window on features", (int)place);
            if (in->wide) break;
            out->height = slid(in->height, s->window[0], s->stride[0], s->padding[0], s->dilation[0]);
            out->width = slid(in->width, s->window[1], s->stride[1], s->padding[1], s->dilation[1]);
            break;
        }
        case STAGE_NORM:
            for (int i = 0; i < 4; i++)
                if (!has(tensor_of(m, s, i), in->channels)) return say(why, "operation %d has a norm of another shape", (int)place);
            if (s->groups ? in->wide || in->channels % s->groups : !tensor_of(m, s, 2) || !tensor_of(m, s, 3))
                return say(why, "operation %d is a norm that cannot be", (int)place);
            break;
        case STAGE_POOL:
            if (in->wide) return say(why, "operation %d pools features", (int)place);
            for (int i = 0; i < 2; i++)
                if (2 * s->padding[i] > s->window[i]) return say(why, "operation %d pools nothing but padding", (int)place);
            out->height = slid(in->height, s->window[0], s->stride[0], s->padding[0], 1);
            out->width = slid(in->width, s->window[1], s->stride[1], s->padding[1], 1);
            break;
        case STAGE_MEAN:
        case STAGE_FLATTEN:
            if (in->wide) return say(why, "operation %d flattens features", (int)place);
            if (s->kind == STAGE_FLATTEN && in->channels > MOST_FLOATS / in->height / in->width) return say(why, "its images are too large");
            *out = (form){s->kind == STAGE_MEAN ? in->channels : in->channels * in->height * in->width, 1, 1, 1, 0};
            break;
        default: break;
    }
    if (s->other >= 0) {
        const form *more = &m->stages[s->other].form;
        if (more->channels != out->channels || more->height != out->height || more->width != out->width || more->wide != out->wide)
            return say(why, "operation %d adds values of other shapes", (int)place);
    }
    if (out->height < 1 || out->width < 1) return say(why, "operation %d has an image without pixels", (int)place);
    /* a border of at most 2^16 on each side keeps these products far from 2^63 */
    if (out->channels > MOST_FLOATS / LANES || out->height > MOST_FLOATS / LANES / out->channels ||
        out->width > MOST_FLOATS / LANES / out->channels / out->height)
        return say(why, "operation %d gives more values than fit", (int)place);
    return 1;
}

/* ---- weights, and norms folded into them ---- */

static int64_t put(model *m, int64_t count) {
    const int64_t at = m->used;
    m->used += count;
    return at;
}

static int64_t copied(model *m, const stored_tensor *t) {
    if (!t) return -1;
    const int64_t at = put(m, t->size);
    for (int64_t i = 0; i < t->count; i++) m->weights[at + (t->places ? t->places[i] : i)] = t->values[i];
    return at;
}

/* A norm over the batch right behind links: what it multiplies by goes into their weights, what it adds is their bias. */
static void fold(model *m, const stage *norm, const stage *links) {
    const stored_tensor *weight = tensor_of(m, links->s, 0);
    const int64_t outs = links->form.channels, each = weight->size / outs;
    float *bias = m->weights + links->bias, *values = m->weights + links->values;
    const float *vectors[4];
    for (int k = 0; k < 4; k++) vectors[k] = norm->vectors[k] < 0 ? 0 : m->weights + norm->vectors[k];
    for (int64_t o = 0, i = 0; o < outs; o++) {
        const double factor = (vectors[0] ? vectors[0][o] : 1.0) / sqrt((double)vectors[3][o] + norm->s->eps);
        bias[o] = (float)((vectors[1] ? vectors[1][o] : 0.0) + ((double)bias[o] - vectors[2][o]) * factor);
        for (; i < weight->count && (weight->places ? weight->places[i] : i) < (o + 1) * each; i++) values[i] = (float)(values[i] * factor);
    }
}

static int weighed(model *m, char *why) {
    const int64_t n = m->stored.stages;
    int64_t room = 1;
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < 4; k++) {
            const stored_tensor *t = tensor_of(m, m->stages[i].s, k);
            room += !t ? 0 : t->size > MOST_FLOATS ? MOST_FLOATS : m->stages[i].s->kind == STAGE_LINKS && !k ? t->count + t->shape[0] : t->size;
            if (room > MOST_FLOATS) return say(why, "it has more weights than fit");
        }
    if (!(m->weights = calloc((size_t)room, sizeof(float)))) return say(why, "there is not enough memory for it");
    for (int64_t i = 0; i < n; i++) {
        stage *t = m->stages + i;
        if (t->s->kind == STAGE_NORM)
            for (int k = 0; k < 4; k++) t->vectors[k] = copied(m, tensor_of(m, t->s, k));
        if (t->s->kind != STAGE_LINKS) continue;
        const stored_tensor *weight = tensor_of(m, t->s, 0), *bias = tensor_of(m, t->s, 1);
        t->links = t->s;
        t->values = put(m, weight->count);
        memcpy(m->weights + t->values, weight->values, (size_t)weight->count * sizeof(float));
        t->bias = bias ? copied(m, bias) : put(m, t->form.channels);
    }
    return 1;
}

/* Which stages compute, what they add to, and until when a value is read. */
static void joined(model *m) {
    const int64_t n = m->stored.stages;
    for (int64_t i = 1; i < n; i++) {
        stage *t = m->stages + i, *links = m->stages + t->source;
        const int alone = links->last == i && links->readers == 1;
        if (t->s->kind == STAGE_NORM && !t->s->groups && links->s->kind == STAGE_LINKS && !links->s->relu && alone) {
            fold(m, t, links);
            links->folded = 1;
            t->links = links->s;
            t->values = links->values;
            t->bias = links->bias;
            t->source = links->source;
            m->stages[t->source].last = i > m->stages[t->source].last ? i : m->stages[t->source].last;
        }
        t->in_place = t->links && t->other >= 0 && t->other != t->source && m->stages[t->other].last == i;
    }
    for (int64_t i = n - 1; i > 0; i--) {
        const stage *t = m->stages + i;
        if (t->links && !t->folded)
            for (int k = 0; k < 2; k++) {
                int64_t *border = &m->stages[t->source].form.border;
                if (t->links->padding[k] > *border) *border = t->links->padding[k];
            }
        if (t->in_place && t->form.border > m->stages[t->other].form.border) m->stages[t->other].form.border = t->form.border;
    }
}

static int understood(model *m, char *why) {
    const int64_t n = m->stored.stages;
    if (!n) return say(why, "it has no operations: the model has parts that the kernels do not know, and only fedrts.load reads it");
    m->stages = calloc((size_t)n, sizeof *m->stages);
    if (!m->stages) return say(why, "there is not enough memory for it");
    for (int64_t i = 0; i < n; i++) {
        stage *t = m->stages + i;
        t->s = m->stored.stage + i;
        t->source = i ? t->s->source : -1;
        t->other = t->s->other;
        t->last = i;
        if (!shaped(m, i, why)) return 0;
        const int64_t read[2] = {t->source, t->other};
        for (int k = 0; k < 2; k++)
            if (read[k] >= 0) {
                m->stages[read[k]].last = i;
                m->stages[read[k]].readers++;
            }
    }
    const form *last = &m->stages[n - 1].form;
    if (!last->wide || last->channels != m->stored.outputs) return say(why, "its last operation does not give its outputs");
    if (!weighed(m, why)) return 0;
    joined(m);
    return 1;
}

/* ---- the plan ---- */

/* A place that is free again, for a tensor of the same form. */
typedef struct {
    tensor at;
    int free;
} place;

typedef struct {
    model *m;
    plan *p;
    int64_t blocks, floats, indexed;
    place *places;
    int64_t held;
    tensor *values; /* of each stage */
    int fails;
} planner;

static int64_t taken(planner *l, double floats) {
    const int64_t at = l->floats;
    if (floats > (double)MOST_FLOATS || (double)at + floats > (double)MOST_FLOATS) l->fails = 1;
    else l->floats += ((int64_t)floats + LANES - 1) / LANES * LANES;
    return at;
}

static tensor made(planner *l, const form *f) {
    tensor t = {0, l->blocks, f->height, f->channels, f->width, f->border};
    if (f->wide) t = (tensor){0, 1, 1, f->channels, l->blocks, 0};
    for (int64_t i = 0; i < l->held; i++) {
        place *spare = l->places + i;
        t.at = spare->at.at;
        if (!spare->free || memcmp(&t, &spare->at, sizeof t)) continue;
        spare->free = 0;
        return t;
    }
    t.at = taken(l, (double)t.blocks * (double)(t.height + 2 * t.border) * (double)t.channels * (double)(t.width + 2 * t.border) * LANES);
    l->places[l->held++] = (place){t, 0};
    return t;
}

static void freed(planner *l, const tensor *t) {
    for (int64_t i = 0; i < l->held; i++)
        if (l->places[i].at.at == t->at) l->places[i].free = 1;
}

static operation *next(planner *l, int64_t kind) {
    operation *o = l->p->program + l->p->operations++;
    o->kind = kind;
    return o;
}

static int64_t channel_of(const tensor *t) { return (t->width + 2 * t->border) * LANES; }
static int64_t row_of(const tensor *t) { return t->channels * channel_of(t); }
static int64_t block_of(const tensor *t) { return (t->height + 2 * t->border) * row_of(t); }
static int64_t origin(const tensor *t) { return t->at + t->border * (row_of(t) + LANES); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Groups of input channels: see Planner.cuts in fedrts.programs.plan. */
static int64_t group_size(const stored_stage *s, const tensor *in, const tensor *out, int64_t links, int64_t worth) {
    const int64_t wide = least(16, out->width), high = least(out->height, wide == 16 ? 1 : wide >= 8 ? 2 : 4);
    const double rows = (double)(high - 1) * (double)s->stride[0] + (double)s->dilation[0] * (double)(s->window[0] - 1) + 1;
    const double cols = (double)(wide - 1) * (double)s->stride[1] + (double)s->dilation[1] * (double)(s->window[1] - 1) + 1;
    const double wanted = ceil((double)in->channels * rows * cols * LANES * 4 / NEAR);
    int64_t groups = links / (out->channels * worth);
    if (wanted < (double)groups) groups = (int64_t)wanted;
    if (groups < 1) groups = 1;
    return (in->channels + groups - 1) / groups;
}

/* The side of the windows that links come in, for which there are kernels; 0: they come one by one. */
static int64_t window_of(const stored_stage *s, const stored_tensor *weight) {
    const int64_t all = WINDOW * WINDOW;
    for (int k = 0; k < 2; k++)
        if (s->window[k] != WINDOW || s->stride[k] != 1 || s->dilation[k] != 1) return 0;
    if (weight->count % all) return 0;
    for (int64_t j = 0; weight->places && j < weight->count; j += all)
        if (weight->places[j] % all || weight->places[j + all - 1] != weight->places[j] + all - 1) return 0;
    return WINDOW;
}

static void index_links(planner *l, const stored_stage *s, const tensor *in, const tensor *out, gather_op *g) {
    const stored_tensor *weight = tensor_of(l->m, s, 0);
    const int64_t taps = s->window[0] * s->window[1], each = in->channels / s->groups, outs = out->channels, n = weight->count;
    const int64_t worth = WORTH_A_GROUP * (g->window ? g->window : 1);
    const int64_t size = group_size(s, in, out, n, worth), width = in->width + 2 * in->border;
    g->groups = (in->channels + size - 1) / size;
    g->starts = l->indexed;
    g->offsets = l->indexed + (g->groups + 1) * outs;
    l->indexed = g->offsets + n;
    int32_t *starts = l->p->index + g->starts, *offsets = l->p->index + g->offsets;
    int64_t j = 0;
    for (int64_t o = 0; o < outs; o++) {
        const int64_t first = o / (outs / s->groups) * each;
        for (int64_t q = 0; q < g->groups; q++) {
            starts[q * outs + o] = (int32_t)j;
            for (; j < n; j++) {
                const int64_t flat = weight->places ? weight->places[j] : j, tap = flat % taps;
                const int64_t channel = first + flat / taps % each;
                if (flat / taps / each != o || channel / size != q) break;
                const int64_t y = tap / s->window[1] * s->dilation[0] - s->padding[0], x = tap % s->window[1] * s->dilation[1] - s->padding[1];
                offsets[j] = (int32_t)(((y * in->channels + channel) * width + x) * LANES);
            }
        }
        starts[g->groups * outs + o] = (int32_t)j;
    }
}

static void sum(planner *l, const tensor *first, const tensor *second, const tensor *out, int64_t relu) {
    next(l, SUM)->as.sum = (sum_op){*first, second ? *second : (tensor){-1, 0, 0, 0, 0, 0}, *out, relu};
}

static void links(planner *l, const stage *t, const tensor *in, const tensor *other, const tensor *out) {
    const stored_stage *s = t->links;
    gather_op g = {0};
    g.blocks = out->blocks, g.rows = out->height, g.cols = out->width, g.outs = out->channels;
    g.in = origin(in), g.in_block = block_of(in), g.in_row = (t->form.wide ? 1 : s->stride[0]) * row_of(in);
    g.in_col = (t->form.wide ? 1 : s->stride[1]) * LANES;
    g.out = origin(out), g.out_block = block_of(out), g.out_channel = channel_of(out), g.out_row = row_of(out), g.out_col = LANES;
    g.values = t->values, g.bias = t->bias, g.statistics = -1;
    g.add = t->in_place, g.relu = t->s->relu && (!other || t->in_place);
    g.window = window_of(s, tensor_of(l->m, s, 0));
    index_links(l, s, in, out, &g);
    next(l, GATHER)->as.gather = g;
    if (other && !t->in_place) sum(l, out, other, out, t->s->relu);
}

static void norm(planner *l, const stage *t, const tensor *in, const tensor *other, const tensor *out) {
    const int64_t groups = t->s->groups;
    norm_op o = {0};
    o.in = *in, o.out = *out;
    o.shortcut = other ? *other : (tensor){-1, 0, 0, 0, 0, 0};
    o.gamma = t->vectors[0], o.beta = t->vectors[1], o.running_mean = t->vectors[2], o.running_var = t->vectors[3];
    o.saved = taken(l, groups ? 2.0 * (double)out->blocks * (double)groups * LANES : 4.0 * (double)out->channels);
    o.groups = groups, o.relu = t->s->relu, o.wide = t->form.wide, o.eps = t->s->eps;
    next(l, NORM)->as.norm = o;
}

static void emit(planner *l, int64_t i) {
    const stage *t = l->m->stages + i;
    const stored_stage *s = t->s;
    if (t->folded) return;
    const tensor *in = t->source < 0 ? 0 : l->values + t->source, *other = t->other < 0 ? 0 : l->values + t->other;
    const tensor out = l->values[i] = t->in_place ? *other : made(l, &t->form);
    if (l->fails) return;
    if (t->links) links(l, t, in, other, &out);
    else if (s->kind == STAGE_INPUT) next(l, INPUT)->as.input = (input_op){out, t->form.wide};
    else if (s->kind == STAGE_NORM) norm(l, t, in, other, &out);
    else if (s->kind == STAGE_SUM) sum(l, in, other, &out, s->relu);
    else if (s->kind == STAGE_POOL)
        next(l, POOL)->as.pool = (pool_op){*in, out, s->window[0], s->window[1], s->stride[0], s->stride[1], s->padding[0], s->padding[1],
                                           s->mean, s->with_padding};
    else next(l, FLATTEN)->as.flatten = (flatten_op){*in, out, s->kind == STAGE_MEAN, 0, 0};
    const int64_t read[2] = {t->source, t->in_place ? -1 : t->other};
    for (int k = 0; k < 2; k++)
        if (read[k] >= 0 && l->m->stages[read[k]].last == i) freed(l, l->values + read[k]);
}

static void unplan(plan *p) {
    free(p->memory);
    free(p->index);
    free(p->program);
    memset(p, 0, sizeof *p);
}

/* The plan for so many blocks of 16 samples, made when it is first asked for. */
static plan *planned(model *m, int64_t blocks) {
    plan *p = m->plans + blocks - 1;
    if (p->program) return p;
    const int64_t n = m->stored.stages;
    planner l = {m, p, blocks, 0, 0, 0, 0, 0, 0};
    size_t indexed = 1;
    for (int64_t i = 0; i < n; i++) {
        const stored_stage *s = m->stages[i].s;
        if (s->kind == STAGE_LINKS) indexed += (size_t)(tensor_of(m, s, 0)->count * 2 + 2 * m->stages[i].form.channels);
    }
    l.places = calloc((size_t)n, sizeof *l.places);
    l.values = calloc((size_t)n, sizeof *l.values);
    p->index = malloc(indexed * sizeof *p->index);
    p->program = calloc((size_t)(2 * n + 1), sizeof *p->program);
    l.fails = !l.places || !l.values || !p->index || !p->program;
    for (int64_t i = 0; i < n && !l.fails; i++) emit(&l, i);
    if (!l.fails) {
        next(&l, OUTPUT)->as.output.in = l.values[n - 1];
        p->memory = calloc((size_t)l.floats + LANES, sizeof(float));
        l.fails = !p->memory;
        if (p->memory) p->arena = p->memory + (-(uintptr_t)p->memory & 63) / sizeof(float);
    }
    free(l.places);
    free(l.values);
    if (l.fails) unplan(p);
    return l.fails ? 0 : p;
}

/* ---- what others call ---- */

model *fedrts_open(const uint8_t *bytes, int64_t length, char *why) {
    model *m = calloc(1, sizeof *m);
    if (!m) return say(why, "there is not enough memory for it"), NULL;
    if (!fedrts_read(&m->stored, bytes, length, why) || !understood(m, why)) {
        fedrts_close(m);
        return 0;
    }
    for (int64_t i = 0; i < m->stored.tensors; i++) { /* the weights have them now */
        free(m->stored.tensor[i].values);
        m->stored.tensor[i].values = 0;
    }
    for (int64_t i = 0; i < MOST_BLOCKS * LANES; i++) m->rows[i] = i;
    return m;
}

void fedrts_close(model *m) {
    if (!m) return;
    for (int i = 0; i < MOST_BLOCKS; i++) unplan(m->plans + i);
    fedrts_release(&m->stored);
    free(m->stages);
    free(m->weights);
    free(m);
}

int64_t fedrts_predict(model *m, int64_t isa, const float *inputs, int64_t samples, float *outputs) {
    for (int64_t done = 0; done < samples;) {
        const int64_t some = least(samples - done, MOST_BLOCKS * LANES);
        const plan *p = planned(m, (some + LANES - 1) / LANES);
        if (!p) return NO_MEMORY;
        context with = {0};
        with.arena = p->arena, with.weights = m->weights, with.index = p->index;
        with.source = inputs + done * m->stored.size, with.rows = m->rows, with.size = m->stored.size;
        with.samples = some, with.steps = 1, with.outputs = outputs + done * m->stored.outputs;
        const int64_t failed = fedrts_run(isa, p->program, p->operations, &with);
        if (failed) return failed;
        done += some;
    }
    return DONE;
}

void fedrts_normalise(const model *m, const uint8_t *pixels, int64_t samples, float *inputs) {
    const stored_model *s = &m->stored;
    const int64_t each = s->channels ? s->size / s->channels : s->size;
    for (int64_t i = 0; i < samples * s->size; i++) {
        const int64_t channel = i / each % (s->channels ? s->channels : 1);
        inputs[i] = s->channels ? (float)pixels[i] * s->scale[channel] + s->shift[channel] : (float)pixels[i];
    }
}

int64_t fedrts_fact(const model *m, int64_t which) {
    const stored_model *s = &m->stored;
    int64_t all = 0, active = 0;
    for (int64_t i = 0; i < s->tensors; i++)
        if (s->tensor[i].rank > 1) all += s->tensor[i].size, active += s->tensor[i].count;
    switch (which) {
        case FACT_INPUT_SIZE: return s->size;
        case FACT_OUTPUTS: return s->outputs;
        case FACT_CHANNELS: return s->channels;
        case FACT_WEIGHTS: return all;
        case FACT_ACTIVE: return active;
        case FACT_OPERATIONS: return s->stages;
        case FACT_RANK: return s->rank;
        default: return which >= FACT_SHAPE && which < FACT_SHAPE + s->rank ? s->shape[which - FACT_SHAPE] : 0;
    }
}
