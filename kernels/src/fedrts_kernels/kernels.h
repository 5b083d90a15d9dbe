/* The plain C interface of the kernels: operations, and the memory they work on.

   A program is an array of operations that runs once for every batch. Operations say where their operands are as numbers of floats from the
   beginning of one of four arrays: the arena (activations and scratch), the weights, their gradient, and the index of active links.

   A tensor has 16 samples innermost: [blocks][height + 2 border][channels][width + 2 border][16]. Its border is 0 and is never written.
   Features without positions lie "wide": one block, height 1, no border, and the blocks of 16 samples along the width. */
#ifndef FEDRTS_KERNELS_H
#define FEDRTS_KERNELS_H
#include <stdint.h>

#define FEDRTS_ABI 4
#define LANES 16
#define WINDOW 3

typedef struct {
    int64_t at, blocks, height, channels, width, border;
} tensor; /* at < 0: there is none */

/* Links come output by output, and each output's by input channel. They are worked through in groups of neighbouring channels, so that what
   many outputs read of the input stays in the nearest cache: those of output o in group g are starts[g][o] to starts[g + 1][o].

   `window`: WINDOW if links come in nines, the whole 3×3 window of an input channel by row and column, with neighbouring positions at neighbouring
   places of the input: what is read then serves all nine, and only the first one's offset counts. Otherwise 0. */

/* out[b, o, y, x] = bias[o] + sum over links j of o: values[j] * in[b, y * in_row + x * in_col + offsets[j]]; `add`: to what is there */
typedef struct {
    int64_t blocks, rows, cols, outs;
    int64_t in, in_block, in_row, in_col;
    int64_t out, out_block, out_channel, out_row, out_col;
    int64_t groups, starts, offsets; /* in the index: [groups + 1][outs], [links] as above */
    int64_t values;                  /* in the weights, or in the arena */
    int64_t bias;            /* in the weights; < 0: none */
    int64_t statistics;      /* in the arena [outs][2][16]: mean and squared deviations of what was written; < 0: not asked for */
    int64_t values_in_arena, relu, add, window;
} gather_op;

/* gradient[j] = sum over b, y, x, samples of out's gradient times in at offsets[j] */
typedef struct {
    int64_t blocks, rows, cols, outs;
    int64_t in, in_block, in_row, in_col;
    int64_t slope, slope_block, slope_channel, slope_row;
    int64_t groups, starts, offsets;
    int64_t scratch;  /* in the arena [links of the largest group][16] */
    int64_t gradient; /* in the gradient */
    int64_t window;
} weight_op;

/* arena[out + i] = weights[values + order[i]] */
typedef struct {
    int64_t links, values, order, out;
} permute_op;

typedef struct {
    tensor in, out, shortcut;
    int64_t gamma, beta;                 /* in the weights; < 0: none */
    int64_t running_mean, running_var;   /* in the weights; < 0: none */
    int64_t statistics;                  /* in the arena [channels][2][16] */
    int64_t saved;                       /* in the arena: means, then inverse deviations; [channels] or [blocks][groups][16] each */
    int64_t groups;                      /* 0: over the batch */
    int64_t counted;                     /* the statistics are there: the gather has made them */
    int64_t relu, wide, training;
    double eps, momentum;
} norm_op;

typedef struct {
    tensor slope;  /* of the output; with a shortcut it becomes what passes the ReLU */
    tensor output; /* what the norm gave, where the ReLU has to look at it (after a shortcut) */
    tensor in, to; /* the norm's input, and the gradient of it */
    int64_t gamma, beta, statistics, saved, groups, relu, wide, add;
    double eps;
} norm_back_op;

/* to (+)= slope where `output` is positive (if there is one); bias gradient: sums over all but channels */
typedef struct {
    tensor slope, output, to;
    int64_t bias, add; /* bias: in the gradient; < 0: none */
    int64_t scratch;   /* in the arena [channels][16] */
} relu_back_op;

typedef struct {
    tensor first, second, out; /* second.at < 0: a copy */
    int64_t relu;
} sum_op;

typedef struct {
    tensor in, out;
    int64_t height, width, down, across, above, left; /* window, stride, padding */
    int64_t mean, with_padding;                       /* a mean, in which padding counts; otherwise the largest */
} pool_op;

typedef struct {
    tensor slope, out, in, to; /* out and in: of the forward pass, for the largest */
    int64_t height, width, down, across, above, left;
    int64_t mean, with_padding, add;
} pool_back_op;

/* Positions become features (wide), or their means do; and back. */
typedef struct {
    tensor in, out;
    int64_t mean, back, add; /* back: from out to in */
} flatten_op;

typedef struct {
    tensor out;
    int64_t wide;
} input_op;

typedef struct {
    tensor in; /* wide */
} output_op;

typedef struct {
    tensor in, to; /* wide; to: the gradient */
    int64_t squares; /* mean squared error, otherwise cross-entropy */
    double smoothing;
} loss_op;

typedef struct {
    int64_t parameters;
    double momentum, decay, proximal, clip;
} descent_op;

enum { GATHER, WEIGHT, PERMUTE, NORM, NORM_BACK, RELU_BACK, SUM, POOL, POOL_BACK, FLATTEN, INPUT, OUTPUT, LOSS, DESCENT };

typedef struct {
    int64_t kind;
    union {
        gather_op gather;
        weight_op weight;
        permute_op permute;
        norm_op norm;
        norm_back_op norm_back;
        relu_back_op relu_back;
        sum_op sum;
        pool_op pool;
        pool_back_op pool_back;
        flatten_op flatten;
        input_op input;
        output_op output;
        loss_op loss;
        descent_op descent;
    } as;
} operation;

typedef struct {
    float *arena, *weights, *gradient;
    const int32_t *index;
    const float *source;    /* samples [.., size], float32 */
    const int64_t *rows;    /* [steps][samples]: which of the source and the targets */
    const void *targets;    /* int64 labels [..], or floats [.., outputs] */
    int64_t size, samples, steps;
    const float *rates;     /* [steps] */
    float *velocity;        /* [parameters]; NULL without momentum */
    const float *received;  /* [parameters]; NULL without a proximal term */
    const float *free;      /* [parameters]: 1, and 0 where a parameter is frozen; NULL: all are free */
    float *losses;          /* [steps]; NULL: not asked for */
    float *outputs;         /* [steps][samples][outputs]; NULL: not asked for */
} context;

/* What a program comes to: 0, or what is wrong with it. */
enum { DONE = 0, UNKNOWN_OPERATION = 1, LABEL_OUT_OF_RANGE = 2, UNKNOWN_ISA = 3 };

#if defined(__GNUC__)
#define PUBLIC __attribute__((visibility("default")))
#else
#define PUBLIC
#endif

PUBLIC int64_t fedrts_abi(void);
PUBLIC int64_t fedrts_size_of_operation(void);
PUBLIC int64_t fedrts_size_of_context(void);
/* isa: 0 portable, 1 AVX2, 2 AVX-512 */
PUBLIC int64_t fedrts_has(int64_t isa);
PUBLIC int64_t fedrts_run(int64_t isa, const operation *program, int64_t operations, const context *with);
#endif
