/* Calls that come when the thread's variables have been destroyed: of exit handlers, which run behind the destructors of
 * the main thread's variables (static objects' destructors are exit handlers), and of keys' destructors. */
#include <pthread.h>
#include <ringsight.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ncclComm_t comms[3];
static cudaStream_t stream;
static float data[100];
static int turns;

static void check(int line, ncclResult_t got, ncclResult_t expected) {
  if (got == expected) return;
  printf("line %d: %d, not %d: %s\n", line, got, expected, ncclGetLastError(NULL));
  fflush(stdout);
  _exit(1);
}
#define OK(call) check(__LINE__, call, ncclSuccess)
#define FAILS(call, code, text)                                                                      \
  do {                                                                                               \
    check(__LINE__, call, code);                                                                     \
    if (!strstr(ncclGetLastError(NULL), text)) check(__LINE__, ncclInternalError, ncclSuccess);      \
  } while (0)

/* Everything that a program may do on its way out. */
static void use(ncclComm_t comm) {
  ncclComm_t child;
  int count = 0;
  ncclUniqueId id;
  OK(ncclAllReduce(data, data, 100, ncclFloat, ncclSum, comm, stream));
  OK(ringsightStreamSynchronize(stream));
  OK(ncclGroupStart());
  OK(ncclGroupStart());
  OK(ncclAllReduce(data, data, 100, ncclFloat, ncclSum, comm, stream));
  OK(ncclGroupEnd());
  OK(ncclGroupEnd());
  OK(ringsightStreamSynchronize(stream));
  OK(ncclCommSplit(comm, 0, 0, &child, NULL));
  OK(ncclCommDestroy(child));
  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&child, 1, id, 0));
  OK(ncclCommCount(child, &count));
  OK(ncclCommAbort(child));
  FAILS(ncclCommCount(NULL, &count), ncclInvalidArgument, "ncclCommCount: comm is NULL");
  FAILS(ncclGroupEnd(), ncclInvalidUsage, "without ncclGroupStart");
}

static void at_exit(void) {
  use(comms[0]);
  OK(ncclCommFinalize(comms[0]));
  OK(ncclCommDestroy(comms[0]));
  OK(ncclCommAbort(comms[1]));
  OK(ncclCommDestroy(comms[2]));
  puts("exit ok");
  fflush(stdout);
}

static pthread_key_t key;

static void at_thread_exit(void* value) {
  /* The first turn may come before the library's own variables of this thread are gone, the next ones do not. */
  use(comms[1]);
  if (++turns < 3) pthread_setspecific(key, value);
}

static void* thread(void* unused) {
  int count;
  OK(pthread_setspecific(key, comms));
  FAILS(ncclCommCount(NULL, &count), ncclInvalidArgument, "comm is NULL");
  OK(ncclGroupStart()); /* and never closed */
  return unused;
}

int main(void) {
  ncclUniqueId id;
  pthread_t other;
  int i, count;
  OK(atexit(at_exit));
  for (i = 0; i < 3; i++) {
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&comms[i], 1, id, 0));
  }
  OK(ringsightStreamCreate(&stream));
  OK(ncclAllReduce(data, data, 100, ncclFloat, ncclSum, comms[0], stream));
  FAILS(ncclCommUserRank(NULL, &count), ncclInvalidArgument, "ncclCommUserRank");
  OK(pthread_key_create(&key, at_thread_exit));
  OK(pthread_create(&other, NULL, thread, NULL));
  OK(pthread_join(other, NULL));
  printf("thread ok after %d turns\n", turns);
  return 0;
}
