/* A stock communication library whose functions begin with instructions of either kind that is probed by a trap, and loops that
 * time calls of them. */
#define _GNU_SOURCE
#include <time.h>
__asm__(".text\n"
        ".globl ncclAllReduce\n.type ncclAllReduce, @function\n"
        "ncclAllReduce: xor %eax, %eax\n ret\n.size ncclAllReduce, . - ncclAllReduce\n"
        ".globl ncclGather\n.type ncclGather, @function\n"
        "ncclGather: push %rbx\n pop %rbx\n xor %eax, %eax\n ret\n.size ncclGather, . - ncclGather\n"
        ".globl ncclScatter\n.type ncclScatter, @function\n"
        "ncclScatter: lea (%rdi,%rsi,1), %rax\n xor %eax, %eax\n ret\n.size ncclScatter, . - ncclScatter\n");
int ncclGather(void);
int ncclScatter(void);
int ncclGetVersion(int* version) { *version = 22703; return 0; }
static long now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1000000000L + time.tv_nsec; }
/* Nanoseconds of CPU that `count` calls take. */
long timed_push(long count) {
  long begun = now();
  while (count-- > 0) ncclGather();
  return now() - begun; }
long timed_lea(long count) {
  long begun = now();
  while (count-- > 0) ncclScatter();
  return now() - begun; }
