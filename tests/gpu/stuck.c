/* Loaded before a library of collectives by LD_PRELOAD: at its tenth all_reduce a program that knows nothing of it asks for a
 * kernel that never ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { CALL = 10 };

typedef int (*all_reduce_t)(const void*, void*, size_t, int, int, void*, void*);
typedef int (*simulate_t)(void*);

static void* find(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function == NULL) {
    fprintf(stderr, "stuck: the library has no %s\n", name);
    exit(3);
  }
  return function;
}

/* nccl.h; enumerations are integers. */
__attribute__((visibility("default"))) int ncclAllReduce(const void* send, void* receive, size_t count, int type, int reduction,
                                                         void* comm, void* stream) {
  static int calls;
  all_reduce_t all_reduce = (all_reduce_t)find("ncclAllReduce");
  if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == CALL) {
    simulate_t simulate = (simulate_t)find("ncclSimulateKernelTimeout");
    int result = simulate(comm);
    fprintf(stderr, "stuck: ncclSimulateKernelTimeout returned %d\n", result);
    if (result != 0) return result;
  }
  return all_reduce(send, receive, count, type, reduction, comm, stream);
}
