// What one eager all_reduce of 8 bytes takes of the calling thread: time, allocations, calls of the driver. For the driver of
// libcuda.cpp with RINGSIGHT_MOCK_KERNELS=skip, where all of it but some 50 ns is the library's own.
//
// calls LIBRARY [BATCHES]
#include "rank.h"

#include <malloc.h>

// ---- allocations of this thread ----
static __thread unsigned long allocations, frees;
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t), __libc_free(void*);
extern void* __libc_memalign(size_t, size_t);
void* malloc(size_t bytes) { return allocations++, __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) { return allocations++, __libc_calloc(count, bytes); }
void* realloc(void* old, size_t bytes) { return allocations++, __libc_realloc(old, bytes); }
void free(void* old) { frees += old != NULL, __libc_free(old); }
void* aligned_alloc(size_t align, size_t bytes) { return allocations++, __libc_memalign(align, bytes); }
int posix_memalign(void** place, size_t align, size_t bytes) {
  allocations++;
  *place = __libc_memalign(align, bytes);
  return *place == NULL ? ENOMEM : 0;
}

// What the driver counts: as in mock/state.h.
enum { BATCH = 200, WARM = 20, MAX_BATCHES = 100000, CHANGED = 8, COUNTED };
static int batches = 200;
static const uint64_t* (*driver_calls)(void);

static void call(struct Rank* r) { NC(AllReduce((void*)r->send, (void*)r->recv, 2, F32, 0, r->comm, r->stream)); }

static void* run(void* argument) {
  struct Rank* r = argument;
  r->device = r->rank % devices;
  make_current(r->device);
  buffers(r, 4096);
  // More than a GPU has graphs for: they give back what they had.
  for (int before = 0; before < 20; before++) {
    open_rank(r, before % 2);
    call(r);
    barrier();
    NC(CommDestroy(r->comm));
    barrier();
  }
  open_rank(r, 0);
  if (r->rank == 0) {
    static double times[MAX_BATCHES], changed[MAX_BATCHES];
    // Of the batch with the fewest: where the machine keeps the library's threads from running for a while, more is under way than ever
    // before, and has its memory anew.
    unsigned long allocated = ~0ul, all_allocated = 0;
    uint64_t counts[COUNTED] = {0};
    for (int batch = -WARM; batch < batches; batch++) {
      const unsigned long allocations_before = allocations + frees;
      uint64_t before[COUNTED];
      memcpy(before, driver_calls(), sizeof before);
      const double start = now();
      for (int i = 0; i < BATCH; i++) call(r);
      const double end = now();
      if (batch >= 0) {
        times[batch] = (end - start) / BATCH * 1e9;
        const unsigned long here = allocations + frees - allocations_before;
        all_allocated += here;
        if (here < allocated) allocated = here;
        for (int i = 0; i < COUNTED; i++) counts[i] += driver_calls()[i] - before[i];
        changed[batch] = (double)(driver_calls()[CHANGED] - before[CHANGED]) / BATCH;
      }
      // As many as a GPU has under way; those of the batch are over by the next one.
      usleep(300);
    }
    // Each call in another stream than the one before: it waits for that. Twice in each: every other call does.
    CUstream other, streams[2] = {r->stream, NULL};
    CU(cuStreamCreate, &other, 1u);
    streams[1] = other;
    // The first change is seen late: nothing is behind what was called before it. From now on there is.
    for (int i = 1; i >= 0; i--) {
      r->stream = streams[i];
      call(r);
    }
    double changes[2];
    for (int times_each = 1; times_each <= 2; times_each++) {
      const uint64_t before = driver_calls()[2];
      for (int i = 0; i < BATCH; i++) {
        r->stream = streams[i / times_each % 2];
        call(r);
      }
      changes[times_each - 1] = (double)(driver_calls()[2] - before) / BATCH;
    }
    r->stream = streams[0];
    qsort(times, (size_t)batches, sizeof *times, by_value);
    // Those during which that has been so had some of it elsewhere.
    qsort(changed, (size_t)batches, sizeof *changed, by_value);
    const double all = (double)batches * BATCH;
    printf("ns best %.0f median %.0f p90 %.0f, allocations and frees %.3f on average\n", times[0], times[batches / 2],
           times[batches * 9 / 10], (double)all_allocated / all);
    printf("ok allocations %.3f launches %.3f records %.3f waits %.3f captures %.3f current %.3f ids %.3f overlapping %.3f graphs %.3f changed %.3f changing %.3f twice %.3f\n",
           (double)allocated / BATCH, (double)counts[0] / all, (double)counts[1] / all,
           (double)counts[2] / all, (double)counts[3] / all, (double)counts[4] / all,
           (double)counts[5] / all, (double)counts[6] / all, (double)counts[7] / all, changed[batches / 2], changes[0], changes[1]);
  }
  barrier();
  NC(CommAbort(r->comm));
  return NULL;
}

int main(int arguments, char** argument) {
  if (arguments < 2) return fprintf(stderr, "calls LIBRARY [BATCHES]\n"), 2;
  library = argument[1];
  mode = "calls";
  if (arguments > 2) batches = atoi(argument[2]);
  if (batches < 1 || batches > MAX_BATCHES) return fprintf(stderr, "1 to %d batches\n", MAX_BATCHES), 2;
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrier_init(&shared->barrier, NULL, (unsigned)ranks);
  load();
  *(void**)&driver_calls = dlsym(RTLD_DEFAULT, "ringsight_mock_calls");
  if (!driver_calls) fail("not the driver without a GPU");
  static struct Rank all[MAX_RANKS];
  pthread_t threads[MAX_RANKS];
  for (int i = 0; i < ranks; i++) {
    all[i].rank = i;
    pthread_create(&threads[i], NULL, run, &all[i]);
  }
  for (int i = 0; i < ranks; i++) pthread_join(threads[i], NULL);
  return shared->failed;
}
