/* Trained models from archives (docs/export.md of fedrts), and what they predict. No file is trusted: every length is checked before memory
   is taken for it, and whatever is wrong with one is said in a line. A model belongs to one thread at a time. */
#ifndef FEDRTS_MODEL_H
#define FEDRTS_MODEL_H
#include "kernels.h"

#define ROOM_FOR_WHY 160
#define MOST_RANK 8

/* ---- an archive, as it stands in the file ---- */

typedef struct {
    int64_t rank, shape[MOST_RANK], size; /* size: of all elements */
    int64_t count;                        /* of those that are there; ascending places and values of them */
    int32_t *places;                      /* NULL: all are there */
    float *values;                        /* NULL: no numbers that a program uses */
} stored_tensor;

typedef enum { STAGE_INPUT, STAGE_LINKS, STAGE_NORM, STAGE_SUM, STAGE_POOL, STAGE_MEAN, STAGE_FLATTEN, STAGE_KINDS } stage_kind;

typedef struct {
    stage_kind kind;
    int64_t relu, source, other; /* other < 0: none */
    int64_t wide;                /* input: features, or images with one position */
    int64_t tensors[4];          /* links: weight, bias; norm: gamma, beta, mean, variance; < 0: none */
    int64_t window[2], stride[2], padding[2], dilation[2]; /* down, across */
    int64_t groups, mean, with_padding;
    double eps;
} stored_stage;

typedef struct {
    int64_t rank, shape[MOST_RANK], size; /* of an input */
    int64_t outputs;
    int64_t channels; /* that are normalised; 0: none */
    float *scale, *shift;
    int64_t tensors, stages;
    stored_tensor *tensor;
    stored_stage *stage;
} stored_model;

/* 1, or 0 with a line in `why`; release it either way. */
int fedrts_read(stored_model *into, const uint8_t *bytes, int64_t length, char *why);
void fedrts_release(stored_model *);

/* ---- a model that predicts ---- */

typedef struct model model;

PUBLIC model *fedrts_open(const uint8_t *bytes, int64_t length, char *why);
PUBLIC void fedrts_close(model *);
/* Outputs [samples][outputs] of inputs [samples][size]; 0, or what is wrong as `fedrts_run` says it, or NO_MEMORY. */
PUBLIC int64_t fedrts_predict(model *, int64_t isa, const float *inputs, int64_t samples, float *outputs);
/* Pixels as they are stored become inputs. */
PUBLIC void fedrts_normalise(const model *, const uint8_t *pixels, int64_t samples, float *inputs);
enum { NO_MEMORY = 4 };
enum { FACT_INPUT_SIZE, FACT_OUTPUTS, FACT_CHANNELS, FACT_WEIGHTS, FACT_ACTIVE, FACT_OPERATIONS, FACT_RANK, FACT_SHAPE };
/* A number about a model; FACT_SHAPE + i: side i of an input. */
PUBLIC int64_t fedrts_fact(const model *, int64_t which);
#endif
