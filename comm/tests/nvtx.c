/* A tool as NVTX loads it (NVTX_INJECTION64_PATH): it writes each range's beginning and end, and the thread's depth, to the file in
 * RINGSIGHT_TEST_RANGES. Types and numbers of nvtxTypes.h and nvToolsExt's module table, version 3. */
#include <stdio.h>
#include <stdlib.h>

enum { CALLBACKS = 1, CORE = 1, RANGE_PUSH_A = 9, RANGE_POP = 11 };

typedef struct {
  size_t struct_size;
  int (*module_table)(int module, void ****table, unsigned *size);
} Callbacks;

static FILE *out;
static _Thread_local int depth;

static int push(const char *name) {
  fprintf(out, "%d %s\n", depth, name);
  fflush(out);
  return depth++;
}

static int pop(void) {
  fprintf(out, "%d end\n", --depth);
  fflush(out);
  return depth;
}

int InitializeInjectionNvtx2(const void *(*export_table)(unsigned)) {
  const Callbacks *callbacks = export_table(CALLBACKS);
  void ***functions;
  unsigned size;
  if (!callbacks || !callbacks->module_table(CORE, &functions, &size) || size <= RANGE_POP) return 0;
  out = fopen(getenv("RINGSIGHT_TEST_RANGES"), "w");
  *functions[RANGE_PUSH_A] = (void *)push;
  *functions[RANGE_POP] = (void *)pop;
  return out != NULL;
}
