// Preloaded into a process that has to end its other threads before OpenSSL is unmade, part of which is that
// its key goes, and before anything else is: it ends with 99 when it still has some then. One that has just
// ended may be listed for a moment.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { kOthers = 99, kMoments = 1000 };

int usual_threads = 1;  // with what the process had before, such as a sanitizer's

static int count_threads(void) {
  int count = 0;
  DIR *const tasks = opendir("/proc/self/task");
  for (const struct dirent *task; (task = readdir(tasks));) count += task->d_name[0] != '.';
  closedir(tasks);
  return count;
}

static void check(void) {
  const struct timespec moment = {.tv_nsec = 1000000};
  for (int i = 0; count_threads() > usual_threads; ++i) {
    if (i == kMoments) _exit(kOthers);
    nanosleep(&moment, NULL);
  }
}

int pthread_key_delete(pthread_key_t key) {
  check();
  return ((int (*)(pthread_key_t))dlsym(RTLD_NEXT, "pthread_key_delete"))(key);
}

// Runs behind everything that is registered for the end of the process.
__attribute__((destructor)) static void end(void) {
  check();
}
