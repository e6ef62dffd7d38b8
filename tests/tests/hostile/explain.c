/* A library that its process made: what a constructor does to whoever loads it. The test names the attack, and what it is aimed at. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <unistd.h>

#include "library.c"

enum { WRITE = 1, SIGNAL, CONNECT, FORK, LOOP, PRINT, ALLOCATE, SHARE, CRASH, LIE, READ, NOTHING };

static void leave(const char *path) {
  int file = open(path, O_WRONLY | O_CREAT, 0644);
  if (file >= 0) {
    (void)!write(file, "owned", 5);
    close(file);
  }
}

static void __attribute__((constructor)) attack(void) {
  switch (ATTACK) {
  case WRITE: /* As root, or into what is open. */
    leave(MARK);
    leave("/proc/self/root" MARK);
    break;
  case SIGNAL:
    kill(VICTIM, SIGKILL);
    kill(getppid(), SIGKILL);
    ptrace(PTRACE_ATTACH, VICTIM, 0, 0);
    break;
  case CONNECT: {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int connection = socket(AF_INET, SOCK_STREAM, 0);
    (void)!connect(connection, (struct sockaddr *)&address, sizeof address);
    break;
  }
  case FORK:
    if (fork() == 0) {
      for (;;)
        leave(MARK);
    }
    break;
  case LOOP:
    for (;;) {
    }
  case PRINT: {
    static char much[1 << 20];
    memset(much, 'x', sizeof much);
    for (int file = 0; file < 64; ++file)
      for (int times = 0; times < 1024 && write(file, much, sizeof much) > 0; ++times) {
      }
    break;
  }
  case ALLOCATE:
    for (;;) {
      char *memory = malloc(1 << 24);
      if (!memory)
        _exit(7);
      memset(memory, 1, 1 << 24);
    }
  case SHARE: /* What the limit of a process's data does not count. */
    _exit(mmap(0, 1 << 24, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? 7 : 8);
  case CRASH:
    __builtin_trap();
  case LIE: {
    const char lie[] = "\033[2J{\"Ok\":[{\"Ok\":[]}]}\n";
    for (int file = 0; file < 64; ++file)
      (void)!write(file, lie, sizeof lie - 1);
    break;
  }
  case READ: { /* A file of root's, into the answer. */
    char secret[64] = "";
    int file = open(MARK, O_RDONLY);
    if (file >= 0 && read(file, secret, sizeof secret - 1) > 0)
      setenv("SECRET", secret, 1);
    break;
  }
  case NOTHING:
    break;
  }
}

struct row {
  char algorithm[16], protocol[16];
  int chosen, channels;
  char reason[128];
};

/* One row: ring is taken. Its reason is what was read, or what a terminal would obey. */
int ringsightExplain(const void *asked, struct row *rows, int *count) {
  (void)asked;
  const char *secret = getenv("SECRET");
  *rows = (struct row){.algorithm = "ring", .protocol = "simple", .chosen = 0};
  strncpy(rows->reason, secret ? secret : "\033[31mno\n", sizeof rows->reason - 1);
  *count = 1;
  return 0;
}

const char *ncclGetLastError(void *communicator) {
  (void)communicator;
  return "";
}
