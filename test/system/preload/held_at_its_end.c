// Preloaded into a process that ends while a thread of it is giving back what OpenSSL keeps for each thread.
// Such a thread is held until everything that runs when a process ends has run, OpenSSL's own end as well;
// then it goes on, as if it had got OpenSSL's lock just before that.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>

typedef int lock_function(pthread_rwlock_t *);

// Made before OpenSSL's key: at the end of a thread its turn comes first, and then once more.
static pthread_key_t first_key;
static _Thread_local int turns;
static sem_t held, torn_down, gone;

static void at_end_of_thread(void *value) {
  if (++turns == 1)
    pthread_setspecific(first_key, value);
  else
    sem_post(&gone);
}

__attribute__((constructor)) static void begin(void) {
  sem_init(&held, 0, 0);
  sem_init(&torn_down, 0, 0);
  sem_init(&gone, 0, 0);
  pthread_key_create(&first_key, at_end_of_thread);
}

int pthread_rwlock_wrlock(pthread_rwlock_t *lock) {
  if (turns == 0) {
    lock_function *const real = (lock_function *)dlsym(RTLD_NEXT, "pthread_rwlock_wrlock");
    pthread_setspecific(first_key, &first_key);
    return real(lock);
  }
  sem_post(&held);
  sem_wait(&torn_down);
  return 0;
}

void wait_until_held(void) {
  sem_wait(&held);
}

// Runs behind everything that is registered for the end of the process.
__attribute__((destructor)) static void end(void) {
  sem_post(&torn_down);
  sem_wait(&gone);
}
