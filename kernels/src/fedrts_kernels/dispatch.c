/* Which instruction sets this processor has, and the program that runs on one of them. */
#include "kernels.h"

int64_t fedrts_run_portable(const operation *, int64_t, const context *);
#ifdef WITH_X86
int64_t fedrts_run_avx2(const operation *, int64_t, const context *);
int64_t fedrts_run_avx512(const operation *, int64_t, const context *);
#endif

int64_t fedrts_abi(void) { return FEDRTS_ABI; }
int64_t fedrts_size_of_operation(void) { return sizeof(operation); }
int64_t fedrts_size_of_context(void) { return sizeof(context); }

int64_t fedrts_has(int64_t isa) {
#ifdef WITH_X86
    __builtin_cpu_init();
    if (isa == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == 2)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw");
#endif
    return isa == 0;
}

int64_t fedrts_run(int64_t isa, const operation *program, int64_t operations, const context *with) {
    if (isa == 0) return fedrts_run_portable(program, operations, with);
#ifdef WITH_X86
    if (isa == 1 && fedrts_has(1)) return fedrts_run_avx2(program, operations, with);
    if (isa == 2 && fedrts_has(2)) return fedrts_run_avx512(program, operations, with);
#endif
    return UNKNOWN_ISA;
}
