/* Reads archives of trained models. Nothing in them is trusted (see model.h). */
#include "model.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST INT32_MAX /* elements of a tensor */
#define BLOCK 256      /* values that share a scale */

typedef struct {
    const uint8_t *at, *end;
    char *why;
    int failed;
} reader;

static int wrong(reader *r, const char *format, ...) {
    if (!r->failed) {
        va_list given;
        va_start(given, format);
        vsnprintf(r->why, ROOM_FOR_WHY, format, given);
        va_end(given);
    }
    r->failed = 1;
    return 0;
}

static int64_t left(const reader *r) { return r->end - r->at; }

static const uint8_t *take(reader *r, int64_t bytes) {
    if (r->failed || bytes < 0 || bytes > left(r)) {
        wrong(r, "it ends too early");
        return 0;
    }
    r->at += bytes;
    return r->at - bytes;
}

static int64_t byte(reader *r) {
    const uint8_t *p = take(r, 1);
    return p ? *p : 0;
}

static int64_t number(reader *r, int64_t most) {
    int64_t value = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        const int64_t b = byte(r);
        value |= (b & 127) << shift;
        if (r->failed) return 0;
        if (value > most) break;
        if (b < 128) {
            if (b == 0 && shift) break; /* longer than need be */
            return value;
        }
    }
    wrong(r, "it has a number out of range");
    return 0;
}

/* Zeroed memory for what the file has shown to be there. */
static void *room(reader *r, int64_t count, int64_t each) {
    void *p = calloc(count > 0 ? (size_t)count : 1, (size_t)each);
    if (!p) wrong(r, "there is not enough memory for it");
    return p;
}

static uint32_t crc32_of(const uint8_t *p, int64_t length) {
    uint32_t table[256], crc = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int k = 0; k < 8; k++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320u : 0);
    }
    for (int64_t i = 0; i < length; i++) crc = crc >> 8 ^ table[(crc ^ p[i]) & 255];
    return ~crc;
}

/* ---- numbers ---- */

static uint32_t word(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }

static float single(const uint8_t *p) {
    const uint32_t bits = word(p);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static double twice(const uint8_t *p) {
    const uint64_t bits = word(p) | (uint64_t)word(p + 4) << 32;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float half(const uint8_t *p) {
    const uint32_t h = p[0] | (uint32_t)p[1] << 8, sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, part = h & 1023;
    uint32_t bits;
    float x;
    if (exponent == 0) { /* part · 2^-24 */
        x = (float)part * 5.9604644775390625e-8f;
        return sign ? -x : x;
    }
    bits = exponent == 31 ? sign | 0x7f800000u | part << 13 : sign | (exponent + 112) << 23 | part << 13;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- positions: the codings of fedrts.wire.positions ---- */

enum { DENSE = 1, EMPTY, BITMAP, COORDINATE, CSR, CSC, GAP };

static int64_t width_of(int64_t choices) { /* bits that tell so many apart */
    int64_t bits = 0;
    for (int64_t most = choices - 1; most > 0; most >>= 1) bits++;
    return bits;
}

static int bit(const uint8_t *p, int64_t i) { return p[i >> 3] >> (i & 7) & 1; }

/* So many bits from the front, the rest of the last byte 0. */
static const uint8_t *bits_of(reader *r, int64_t count) {
    const uint8_t *p = take(r, (count + 7) / 8);
    if (p && (count & 7) && p[count >> 3] >> (count & 7)) wrong(r, "it has bits set that mean nothing");
    return r->failed ? 0 : p;
}

/* Integer i of `count` that lie in planes of `width` bits. */
static int64_t plane(const uint8_t *p, int64_t count, int64_t width, int64_t i) {
    int64_t value = 0;
    for (int64_t k = 0; k < width; k++) value |= (int64_t)bit(p, k * count + i) << k;
    return value;
}

static int ascending(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Rows, each with its columns; `down` of a matrix that lies transposed. */
static int32_t *from_rows(reader *r, int64_t rows, int64_t columns, int transposed, int64_t most, int64_t *count) {
    *count = number(r, rows * columns);
    const int64_t length_width = width_of((*count < columns ? *count : columns) + 1), width = width_of(columns);
    if (r->failed || *count > most) return wrong(r, "it has more positions than values"), NULL;
    const uint8_t *lengths = bits_of(r, rows * length_width), *at = bits_of(r, *count * width);
    int32_t *found = r->failed ? NULL : room(r, *count, sizeof *found);
    if (!found) return NULL;
    int64_t done = 0;
    for (int64_t y = 0; y < (length_width ? rows : 0); y++) {
        int64_t here = plane(lengths, rows, length_width, y), last = -1;
        if (here > *count - done) break;
        for (; here > 0; here--, done++) {
            const int64_t x = plane(at, *count, width, done);
            if (x >= columns || x <= last) {
                wrong(r, "it has columns that do not ascend");
                return found;
            }
            last = x;
            found[done] = (int32_t)(transposed ? x * rows + y : y * columns + x);
        }
    }
    if (done != *count) wrong(r, "it has rows that do not add up");
    else if (transposed) qsort(found, (size_t)done, sizeof *found, ascending);
    return found;
}

static int32_t *from_gaps(reader *r, int64_t size, int64_t most, int64_t *count) {
    *count = number(r, size);
    const int64_t listed = *count <= size - *count ? *count : size - *count, k = byte(r);
    if (r->failed || *count > most) return wrong(r, "it has more positions than values"), NULL;
    if (k > 31 || listed > INT64_MAX / 64) return wrong(r, "it has a number out of range"), NULL;
    const int64_t bits = 8 * left(r);
    if (listed * (k + 1) > bits) return wrong(r, "it ends too early"), NULL;
    const uint8_t *p = take(r, left(r));
    int32_t *found = r->failed ? NULL : room(r, *count, sizeof *found);
    if (!found) return NULL;
    int64_t i = listed * k, done = 0, last = -1, next = 0;
    for (int64_t j = 0; j < listed; j++) {
        int64_t quotient = 0;
        while (i < bits && !bit(p, i) && quotient <= size >> k) i++, quotient++;
        const int64_t place = last + 1 + (quotient << k) + plane(p, listed, k, j);
        if (i++ >= bits || place >= size || (listed != *count && place - next > *count - done)) { /* no room for what lies between */
            wrong(r, "it has gaps that do not fit");
            return found;
        }
        if (listed == *count) found[done++] = (int32_t)place;
        else for (; next < place; next++) found[done++] = (int32_t)next;
        last = place;
        next = place + 1;
    }
    if (listed != *count) for (; next < size; next++) found[done++] = (int32_t)next;
    if (bits - i > 7) wrong(r, "it has bytes too many");
    for (; i < bits; i++)
        if (bit(p, i)) wrong(r, "it has bits set that mean nothing");
    return found;
}

/* The active ones of `size` arms in a grid of `rows`, ascending, at most `most`; NULL: all are, or something is wrong. */
static int32_t *positions(reader *r, int64_t size, int64_t rows, int64_t most, int64_t *count) {
    const int64_t coding = byte(r), columns = size / rows;
    const int64_t length = number(r, left(r));
    reader own = {take(r, length), 0, r->why, r->failed};
    int32_t *found = NULL;
    if (r->failed) return NULL;
    own.end = own.at + length;
    *count = 0;
    switch (coding) {
        case DENSE: *count = size; break;
        case EMPTY: found = room(&own, 0, sizeof *found); break;
        case BITMAP: {
            const uint8_t *p = bits_of(&own, size);
            for (int64_t i = 0; p && i < size; i++) *count += bit(p, i);
            if (p && *count <= most && (found = room(&own, *count, sizeof *found)))
                for (int64_t i = 0, j = 0; i < size; i++)
                    if (bit(p, i)) found[j++] = (int32_t)i;
            break;
        }
        case COORDINATE: {
            *count = number(&own, size);
            if (*count > most) break;
            const int64_t width = width_of(size);
            const uint8_t *p = bits_of(&own, *count * width);
            if (!p || !(found = room(&own, *count, sizeof *found))) break;
            for (int64_t i = 0; i < *count; i++) {
                const int64_t place = plane(p, *count, width, i);
                if (place >= size || (i && place <= found[i - 1])) wrong(&own, "it has positions that do not ascend");
                if (own.failed) break;
                found[i] = (int32_t)place;
            }
            break;
        }
        case CSR: found = from_rows(&own, rows, columns, 0, most, count); break;
        case CSC: found = from_rows(&own, columns, rows, 1, most, count); break;
        case GAP: found = from_gaps(&own, size, most, count); break;
        default: wrong(&own, "it has positions in a coding that is not known");
    }
    if (*count > most) wrong(&own, "it has more positions than values");
    if (!own.failed && own.at != own.end) wrong(&own, "it has bytes too many");
    r->failed = own.failed;
    return found;
}

/* The links of arms of `block[0]` by `block[1]` channels, ascending. */
static int32_t *links_of(reader *r, int32_t *arms, int64_t count, const stored_tensor *t, const int64_t *block) {
    const int64_t each = t->size / (t->shape[0] * t->shape[1]), columns = t->shape[1] / block[1], links = block[0] * block[1] * each;
    int32_t *found = room(r, count * links, sizeof *found);
    for (int64_t first = 0, last = 0, done = 0; found && first < count; first = last) {
        const int64_t row = arms[first] / columns;
        while (last < count && arms[last] / columns == row) last++;
        for (int64_t o = row * block[0]; o < (row + 1) * block[0]; o++)
            for (int64_t a = first; a < last; a++) {
                const int64_t begin = (o * t->shape[1] + arms[a] % columns * block[1]) * each;
                for (int64_t i = 0; i < block[1] * each; i++) found[done++] = (int32_t)(begin + i);
            }
    }
    free(arms);
    return found;
}

/* ---- tensors ---- */

static const int64_t BYTES_OF[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};
enum { FLOAT32 };
enum { AS_FLOAT32, AS_FLOAT16, AS_INT8, STORED_TYPES };

static void values_of(reader *r, stored_tensor *t, int64_t type) {
    const int64_t n = t->count;
    const uint8_t *p = take(r, n * (type == AS_FLOAT32 ? 4 : type == AS_FLOAT16 ? 2 : 1));
    const uint8_t *scales = type == AS_INT8 ? take(r, (n + BLOCK - 1) / BLOCK * 4) : p;
    t->values = r->failed ? 0 : room(r, n, sizeof *t->values);
    if (!t->values) return;
    for (int64_t i = 0; i < n; i++)
        t->values[i] = type == AS_FLOAT32   ? single(p + 4 * i)
                       : type == AS_FLOAT16 ? half(p + 2 * i)
                                            : (float)(int8_t)p[i] / 127.0f * single(scales + i / BLOCK * 4);
}

static void read_tensor(reader *r, stored_tensor *t) {
    for (int64_t names = number(r, left(r)); names > 0 && !r->failed; names--) take(r, number(r, left(r)));
    const int64_t dtype = byte(r);
    int64_t block[2];
    t->rank = byte(r);
    t->size = 1;
    if (dtype >= (int64_t)sizeof BYTES_OF / 8 || t->rank > MOST_RANK) wrong(r, "it has a tensor of a kind that is not known");
    for (int64_t i = 0; i < t->rank && !r->failed; i++) {
        t->shape[i] = number(r, MOST);
        if (t->shape[i] && t->size > MOST / t->shape[i]) wrong(r, "it has a tensor that is too large");
        t->size *= t->shape[i];
    }
    const int64_t type = byte(r);
    block[0] = number(r, MOST);
    block[1] = number(r, MOST);
    if (type >= STORED_TYPES || (type != AS_FLOAT32 && dtype != FLOAT32)) wrong(r, "it has values of a type that is not known");
    const int grouped = block[0] || block[1];
    if (grouped && (t->rank < 2 || !t->size || !block[0] || !block[1] || t->shape[0] % block[0] || t->shape[1] % block[1]))
        wrong(r, "it has arms that do not divide a layer");
    if (r->failed) return;
    const int64_t each = type == AS_FLOAT16 ? 2 : type == AS_INT8 ? 1 : BYTES_OF[dtype];
    const int64_t links = grouped ? t->size / (t->shape[0] * t->shape[1]) * block[0] * block[1] : 1; /* of an arm */
    const int64_t rows = !t->size || !t->rank ? 1 : grouped ? t->shape[0] / block[0] : t->shape[0];
    t->places = positions(r, t->size / links, rows, left(r) / (each * links), &t->count);
    if (!r->failed && t->places && grouped) t->places = links_of(r, t->places, t->count, t, block);
    t->count *= links;
    if (r->failed) return;
    if (dtype == FLOAT32) values_of(r, t, type);
    else take(r, t->count * each);
}

/* ---- operations ---- */

static void pair(reader *r, int64_t *two, int64_t least) {
    for (int i = 0; i < 2; i++) {
        two[i] = number(r, 1 << 16);
        if (two[i] < least) wrong(r, "it has a window, stride or dilation of 0");
    }
}

static void read_stage(reader *r, stored_stage *s, int64_t place, int64_t tensors) {
    s->kind = (stage_kind)byte(r);
    s->relu = byte(r) != 0;
    s->source = number(r, place > 0 ? place - 1 : 0);
    s->other = number(r, place) - 1;
    s->groups = 0;
    for (int i = 0; i < 4; i++) s->tensors[i] = -1;
    if (!r->failed && (s->kind == STAGE_INPUT) != (place == 0)) wrong(r, "it has an input in the wrong place");
    switch (s->kind) {
        case STAGE_INPUT: s->wide = byte(r) != 0; break;
        case STAGE_LINKS:
            for (int i = 0; i < 2; i++) s->tensors[i] = number(r, tensors) - 1;
            pair(r, s->window, 1);
            pair(r, s->stride, 1);
            pair(r, s->padding, 0);
            pair(r, s->dilation, 1);
            s->groups = number(r, MOST);
            if (s->groups < 1 || s->tensors[0] < 0) wrong(r, "it has a layer without weights");
            break;
        case STAGE_NORM: {
            for (int i = 0; i < 4; i++) s->tensors[i] = number(r, tensors) - 1;
            s->groups = number(r, MOST);
            const uint8_t *p = take(r, 8);
            s->eps = p ? twice(p) : 0;
            break;
        }
        case STAGE_POOL:
            pair(r, s->window, 1);
            pair(r, s->stride, 1);
            pair(r, s->padding, 0);
            s->mean = byte(r) != 0;
            s->with_padding = byte(r) != 0;
            break;
        case STAGE_SUM:
        case STAGE_MEAN:
        case STAGE_FLATTEN: break;
        default: wrong(r, "it has an operation that is not known: a newer fedrts-kernels may read it");
    }
    if (s->other >= 0 && s->kind != STAGE_NORM && s->kind != STAGE_SUM) wrong(r, "it has a sum in the wrong place");
}

int fedrts_read(stored_model *m, const uint8_t *bytes, int64_t length, char *why) {
    reader r = {bytes, bytes + length, why, 0};
    memset(m, 0, sizeof *m);
    if (length < 9 || memcmp(bytes, "FRTA", 4)) return wrong(&r, "it is no archive of fedrts export --format sparse");
    if (bytes[4] != 1) return wrong(&r, "it has format version %d, and 1 is known here", bytes[4]);
    if (crc32_of(bytes, length - 4) != word(bytes + length - 4)) return wrong(&r, "its checksum is wrong: it is damaged");
    r.at += 5;
    r.end -= 4;
    take(&r, number(&r, left(&r))); /* what Python needs to build the module */
    m->rank = number(&r, MOST_RANK);
    m->size = 1;
    for (int64_t i = 0; i < m->rank && !r.failed; i++) {
        m->shape[i] = number(&r, MOST);
        if (!m->shape[i] || m->size > MOST / m->shape[i]) wrong(&r, "it has inputs of an impossible shape");
        else m->size *= m->shape[i];
    }
    m->outputs = number(&r, MOST);
    m->channels = number(&r, left(&r) / 8);
    const uint8_t *p = take(&r, 8 * m->channels);
    if (m->channels && (!m->rank || m->channels != m->shape[0])) wrong(&r, "it normalises channels that inputs do not have");
    if (r.failed) return 0;
    m->scale = room(&r, m->channels, sizeof(float));
    m->shift = room(&r, m->channels, sizeof(float));
    for (int64_t i = 0; i < m->channels && !r.failed; i++) {
        m->scale[i] = single(p + 4 * i);
        m->shift[i] = single(p + 4 * (m->channels + i));
    }
    const int64_t tensors = number(&r, left(&r) / 6); /* none takes fewer bytes */
    m->tensor = r.failed ? 0 : room(&r, tensors, sizeof *m->tensor);
    for (; m->tensor && m->tensors < tensors && !r.failed; m->tensors++) read_tensor(&r, m->tensor + m->tensors);
    const int64_t stages = number(&r, left(&r) / 4);
    m->stage = r.failed ? 0 : room(&r, stages, sizeof *m->stage);
    for (; m->stage && m->stages < stages && !r.failed; m->stages++) read_stage(&r, m->stage + m->stages, m->stages, tensors);
    if (!r.failed && left(&r)) wrong(&r, "it has bytes too many");
    return !r.failed;
}

void fedrts_release(stored_model *m) {
    for (int64_t i = 0; i < m->tensors; i++) {
        free(m->tensor[i].places);
        free(m->tensor[i].values);
    }
    free(m->tensor);
    free(m->stage);
    free(m->scale);
    free(m->shift);
    memset(m, 0, sizeof *m);
}
