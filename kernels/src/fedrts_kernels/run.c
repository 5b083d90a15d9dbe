/* Predicts with a trained model on a machine that has neither Python nor PyTorch: what a device would run.

   Everything that can be wrong with a file is one line and exit code 2. */
#include "model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define MOST_BYTES ((int64_t)1 << 31) /* of a model's file */
#define MOST_BATCH 4096
#define HEADER 128 /* bytes of the header of a .npy file that is written */

static const char USAGE[] =
    "usage: run MODEL [INPUT] [options]\n"
    "\n"
    "MODEL is a file of `fedrts export --format sparse`. INPUT holds samples one after the other, a .npy file or bare\n"
    "numbers of this machine; - or nothing: standard input. float32 is what the model reads; uint8 is pixels as they\n"
    "are stored, which the model normalises itself. Prints a line for every sample: its outputs.\n"
    "\n"
    "  --classes      the number of the largest output instead\n"
    "  --out FILE     write a .npy file instead of printing\n"
    "  --uint8        bare numbers are uint8\n"
    "  --batch N      samples at a time (default 16)\n"
    "  --isa NAME     portable, avx2 or avx512 (default: the best of this processor)\n"
    "  --info         say what the model is, and read no input\n"
    "  --bench        time the first batch: for every number N on standard input, the mean of N runs in seconds;\n"
    "                 0 ends, with the most memory that was used, in KiB\n";

static const char *const ISAS[] = {"portable", "avx2", "avx512"};

typedef struct {
    const char *model, *input, *out;
    int classes, pixels, info, bench;
    int64_t batch, isa;
} options;

/* Samples, as they come. */
typedef struct {
    FILE *file;
    const char *name;
    int pixels;
    int64_t rows; /* that are still to come; < 0: as many as there are */
    char head[6]; /* read already, to see whether it is a .npy file */
    size_t held;
} source;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "error: %s: %s\n", what, why);
    exit(2);
}

static void *some(int64_t count, size_t each) {
    void *p = calloc((size_t)(count > 0 ? count : 1), each);
    if (!p) fail("memory", "there is not enough of it");
    return p;
}

/* ---- files ---- */

static uint8_t *read_all(const char *name, int64_t *length) {
    FILE *file = fopen(name, "rb");
    int64_t room = 1 << 16;
    uint8_t *bytes = malloc((size_t)room);
    if (!file) fail(name, strerror(errno));
    for (*length = 0; bytes;) {
        const size_t got = fread(bytes + *length, 1, (size_t)(room - *length), file);
        *length += (int64_t)got;
        if (ferror(file)) fail(name, strerror(errno));
        if (*length < room) break;
        if (room >= MOST_BYTES) fail(name, "it is too large for a model");
        uint8_t *more = realloc(bytes, (size_t)(room *= 2));
        if (!more) free(bytes);
        bytes = more;
    }
    if (!bytes) fail(name, "there is not enough memory to read it");
    fclose(file);
    return bytes;
}

/* What stands between the brackets of `key` in the header of a .npy file; empty if there is none. */
static const char *entry(const char *header, const char *key) {
    const char *at = strstr(header, key);
    return at ? at + strlen(key) : "";
}

static void read_header(source *from, int64_t size) {
    unsigned char start[12];
    char header[1 << 12] = {0};
    if (fread(start, 1, 4, from->file) != 4) fail(from->name, "its header ends too early");
    const int wide = start[0] > 1; /* after the magic: version, then the length of the header */
    if (wide && fread(start + 4, 1, 2, from->file) != 2) fail(from->name, "its header ends too early");
    const int64_t length = start[2] | start[3] << 8 | (wide ? (int64_t)start[4] << 16 | (int64_t)start[5] << 24 : 0);
    if (length >= (int64_t)sizeof header || fread(header, 1, (size_t)length, from->file) != (size_t)length)
        fail(from->name, "its header is too long, or ends too early");
    const char *kind = entry(header, "'descr': '"), *shape = entry(header, "'shape': (");
    const int one = 1;
    from->pixels = !strncmp(kind, "|u1'", 4);
    if (!from->pixels && strncmp(kind, *(const char *)&one ? "<f4'" : ">f4'", 4)) fail(from->name, "its numbers are neither float32 nor uint8");
    if (strncmp(entry(header, "'fortran_order': "), "False", 5)) fail(from->name, "it is in Fortran's order: save numpy.ascontiguousarray(x)");
    char *next;
    from->rows = strtoll(shape, &next, 10);
    if (next == shape || from->rows < 0) fail(from->name, "it has no samples: its first side is their number");
    double each = 1;
    while (*next == ',' || *next == ' ') {
        const char *before = ++next;
        const int64_t side = strtoll(before, &next, 10);
        if (next == before) {
            next = (char *)before;
            continue;
        }
        each *= (double)side;
    }
    if (each != (double)size) {
        char why[120];
        snprintf(why, sizeof why, "its samples have %.0f numbers, the model reads %lld", each, (long long)size);
        fail(from->name, why);
    }
}

static source open_source(const options *o, int64_t size) {
    source from = {stdin, "standard input", o->pixels, -1, {0}, 0};
    if (strcmp(o->input, "-")) {
        from.name = o->input;
        from.file = fopen(o->input, "rb");
        if (!from.file) fail(o->input, strerror(errno));
    }
    from.held = fread(from.head, 1, sizeof from.head, from.file);
    if (from.held == sizeof from.head && !memcmp(from.head, "\x93NUMPY", sizeof from.head)) {
        from.held = 0;
        read_header(&from, size);
    }
    return from;
}

/* Up to so many bytes; how many there were. */
static size_t fetch(source *from, char *into, size_t bytes) {
    const size_t first = from->held < bytes ? from->held : bytes;
    memcpy(into, from->head, first);
    memmove(from->head, from->head + first, from->held -= first);
    return first + fread(into + first, 1, bytes - first, from->file);
}

/* Up to `most` samples; how many there were. */
static int64_t read_samples(source *from, const model *m, int64_t size, int64_t most, uint8_t *pixels, float *inputs) {
    const size_t each = from->pixels ? 1 : sizeof(float);
    if (from->rows >= 0 && from->rows < most) most = from->rows;
    const int64_t got = (int64_t)fetch(from, from->pixels ? (char *)pixels : (char *)inputs, (size_t)(most * size) * each);
    const int64_t samples = got / (size * (int64_t)each);
    if (ferror(from->file)) fail(from->name, strerror(errno));
    if (got % (size * (int64_t)each) || (from->rows >= 0 && samples < most)) fail(from->name, "it ends within a sample");
    if (from->rows >= 0) from->rows -= samples;
    if (from->pixels) fedrts_normalise(m, pixels, samples, inputs);
    return samples;
}

/* ---- outputs ---- */

static int64_t largest(const float *outputs, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (outputs[i] > outputs[best]) best = i;
    return best;
}

static void print_samples(const options *o, const float *outputs, int64_t samples, int64_t count) {
    for (int64_t n = 0; n < samples; n++, outputs += count) {
        if (o->classes) printf("%lld", (long long)largest(outputs, count));
        for (int64_t i = 0; i < count && !o->classes; i++) printf("%s%.9g", i ? " " : "", (double)outputs[i]);
        putchar('\n');
    }
    fflush(stdout);
}

static void write_header(FILE *file, const options *o, int64_t samples, int64_t count) {
    char shape[64], header[HEADER + 1];
    const int one = 1;
    const char order = *(const char *)&one ? '<' : '>';
    if (o->classes) snprintf(shape, sizeof shape, "(%lld,)", (long long)samples);
    else snprintf(shape, sizeof shape, "(%lld, %lld)", (long long)samples, (long long)count);
    const int used = snprintf(header, sizeof header, "\x93NUMPY\x01%c%c%c{'descr': '%c%s', 'fortran_order': False, 'shape': %s, }", 0,
                              HEADER - 10, 0, order, o->classes ? "i8" : "f4", shape);
    memset(header + used, ' ', (size_t)(HEADER - used));
    header[HEADER - 1] = '\n';
    fwrite(header, 1, HEADER, file);
}

static void write_samples(FILE *file, const options *o, const float *outputs, int64_t samples, int64_t count) {
    if (!o->classes) {
        fwrite(outputs, sizeof(float), (size_t)(samples * count), file);
        return;
    }
    for (int64_t n = 0; n < samples; n++) {
        const int64_t found = largest(outputs + n * count, count);
        fwrite(&found, sizeof found, 1, file);
    }
}

static void predict(const options *o, model *m, const float *inputs, int64_t samples, float *outputs) {
    const int64_t wrong = fedrts_predict(m, o->isa, inputs, samples, outputs);
    if (wrong) fail(o->model, wrong == NO_MEMORY ? "there is not enough memory for its activations" : "the kernels cannot run it");
}

/* ---- what it can do ---- */

static void tell(const model *m) {
    printf("inputs of ");
    for (int64_t i = 0; i < fedrts_fact(m, FACT_RANK); i++) printf("%s%lld", i ? "×" : "", (long long)fedrts_fact(m, FACT_SHAPE + i));
    printf(" numbers%s\n", fedrts_fact(m, FACT_CHANNELS) ? ", normalised from pixels" : "");
    printf("%lld outputs\n", (long long)fedrts_fact(m, FACT_OUTPUTS));
    printf("%lld of %lld weights in %lld operations\n", (long long)fedrts_fact(m, FACT_ACTIVE), (long long)fedrts_fact(m, FACT_WEIGHTS),
           (long long)fedrts_fact(m, FACT_OPERATIONS));
}

static void all(const options *o, model *m, source *from, int64_t size, int64_t count) {
    float *inputs = some(o->batch * size, sizeof *inputs), *outputs = some(o->batch * count, sizeof *outputs);
    uint8_t *pixels = some(from->pixels ? o->batch * size : 0, 1);
    FILE *out = o->out ? fopen(o->out, "wb") : 0;
    if (o->out && !out) fail(o->out, strerror(errno));
    if (out) write_header(out, o, 0, count);
    int64_t samples = 0;
    for (int64_t more; (more = read_samples(from, m, size, o->batch, pixels, inputs)) > 0; samples += more) {
        predict(o, m, inputs, more, outputs);
        if (out) write_samples(out, o, outputs, more, count);
        else print_samples(o, outputs, more, count);
    }
    if (out) {
        rewind(out);
        write_header(out, o, samples, count);
        if (ferror(out) || fclose(out)) fail(o->out, "it cannot be written");
    }
    free(inputs);
    free(outputs);
    free(pixels);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Of this program: what getrusage says may be of whoever started it. */
static long peak(void) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    long found = 0;
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "VmHWM: %ld", &found) == 1) break;
    if (status) fclose(status);
    struct rusage used;
    if (!found && !getrusage(RUSAGE_SELF, &used)) found = used.ru_maxrss;
    return found;
}

static void bench(const options *o, model *m, source *from, int64_t size, int64_t count) {
    float *inputs = some(o->batch * size, sizeof *inputs), *outputs = some(o->batch * count, sizeof *outputs);
    uint8_t *pixels = some(from->pixels ? o->batch * size : 0, 1);
    const int64_t samples = read_samples(from, m, size, o->batch, pixels, inputs);
    long runs;
    while (scanf("%ld", &runs) == 1 && runs > 0) {
        predict(o, m, inputs, samples, outputs); /* another process had the cache */
        const double begun = now();
        for (long i = 0; i < runs; i++) predict(o, m, inputs, samples, outputs);
        printf("%.9f\n", (now() - begun) / (double)runs);
        fflush(stdout);
    }
    printf("%ld\n", peak());
    free(inputs);
    free(outputs);
    free(pixels);
}

static const char *value_of(int *i, int count, char **words) {
    if (*i + 1 >= count) fail(words[*i], "it takes a value; --help says which");
    return words[++*i];
}

static options parsed(int count, char **words) {
    options o = {0, "-", 0, 0, 0, 0, 0, 16, 0};
    int places = 0;
    for (int64_t isa = 0; isa < 3; isa++)
        if (fedrts_has(isa)) o.isa = isa;
    for (int i = 1; i < count; i++) {
        const char *word = words[i];
        if (!strcmp(word, "--help") || !strcmp(word, "-h")) {
            fputs(USAGE, stdout);
            exit(0);
        } else if (!strcmp(word, "--classes")) o.classes = 1;
        else if (!strcmp(word, "--uint8")) o.pixels = 1;
        else if (!strcmp(word, "--info")) o.info = 1;
        else if (!strcmp(word, "--bench")) o.bench = 1;
        else if (!strcmp(word, "--out")) o.out = value_of(&i, count, words);
        else if (!strcmp(word, "--batch")) {
            char *end;
            const char *given = value_of(&i, count, words);
            o.batch = strtoll(given, &end, 10);
            if (*end || end == given || o.batch < 1 || o.batch > MOST_BATCH) fail("--batch", "it is a number from 1 to 4096");
        } else if (!strcmp(word, "--isa")) {
            const char *given = value_of(&i, count, words);
            for (o.isa = 0; o.isa < 3 && strcmp(given, ISAS[o.isa]); o.isa++) {}
            if (o.isa == 3 || !fedrts_has(o.isa)) fail("--isa", "this processor has no such instruction set; known: portable, avx2, avx512");
        } else if (word[0] == '-' && word[1]) fail(word, "there is no such option; --help says what there is");
        else if (places == 0) o.model = word, places++;
        else if (places == 1) o.input = word, places++;
        else fail(word, "there is one model and one input; --help says more");
    }
    if (!o.model) {
        fputs(USAGE, stderr);
        exit(2);
    }
    if (o.bench && !strcmp(o.input, "-")) fail("--bench", "it needs an INPUT file: numbers of runs come on standard input");
    return o;
}

int main(int count, char **words) {
    const options o = parsed(count, words);
    char why[ROOM_FOR_WHY];
    int64_t length;
    uint8_t *bytes = read_all(o.model, &length);
    model *m = fedrts_open(bytes, length, why);
    free(bytes);
    if (!m) fail(o.model, why);
    const int64_t size = fedrts_fact(m, FACT_INPUT_SIZE), outputs = fedrts_fact(m, FACT_OUTPUTS);
    if (o.info) {
        tell(m);
    } else {
        source from = open_source(&o, size);
        if (o.bench) bench(&o, m, &from, size, outputs);
        else all(&o, m, &from, size, outputs);
        if (from.file != stdin) fclose(from.file);
    }
    fedrts_close(m);
    if (fflush(stdout) || ferror(stdout)) fail("standard output", "it cannot be written");
    return 0;
}
