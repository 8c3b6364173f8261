// Threads and locks of C11 by way of those of POSIX, which are the only ones that ThreadSanitizer knows: a
// thread that librdkafka makes would crash at its first allocation. The C library has the same types for
// both.
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <threads.h>

static int result(int error) {
  switch (error) {
    case 0:
      return thrd_success;
    case EBUSY:
      return thrd_busy;
    case ETIMEDOUT:
      return thrd_timedout;
    default:
      return thrd_error;
  }
}

static pthread_mutex_t *mutex(mtx_t *lock) {
  return (pthread_mutex_t *)lock;
}
static pthread_cond_t *condition(cnd_t *signal) {
  return (pthread_cond_t *)signal;
}

int thrd_create(thrd_t *thread, thrd_start_t start, void *argument) {
  return result(pthread_create(thread, NULL, (void *(*)(void *))(uintptr_t)start, argument));
}
int thrd_join(thrd_t thread, int *status) {
  void *returned = NULL;
  const int error = pthread_join(thread, &returned);
  if (status) *status = (int)(intptr_t)returned;
  return result(error);
}
int thrd_detach(thrd_t thread) {
  return result(pthread_detach(thread));
}

int mtx_init(mtx_t *lock, int type) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  if (type & mtx_recursive) pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  return result(pthread_mutex_init(mutex(lock), &attributes));
}
int mtx_lock(mtx_t *lock) {
  return result(pthread_mutex_lock(mutex(lock)));
}
int mtx_trylock(mtx_t *lock) {
  return result(pthread_mutex_trylock(mutex(lock)));
}
int mtx_timedlock(mtx_t *lock, const struct timespec *until) {
  return result(pthread_mutex_timedlock(mutex(lock), until));
}
int mtx_unlock(mtx_t *lock) {
  return result(pthread_mutex_unlock(mutex(lock)));
}
void mtx_destroy(mtx_t *lock) {
  pthread_mutex_destroy(mutex(lock));
}

int cnd_init(cnd_t *signal) {
  return result(pthread_cond_init(condition(signal), NULL));
}
int cnd_signal(cnd_t *signal) {
  return result(pthread_cond_signal(condition(signal)));
}
int cnd_broadcast(cnd_t *signal) {
  return result(pthread_cond_broadcast(condition(signal)));
}
int cnd_wait(cnd_t *signal, mtx_t *lock) {
  return result(pthread_cond_wait(condition(signal), mutex(lock)));
}
int cnd_timedwait(cnd_t *signal, mtx_t *lock, const struct timespec *until) {
  return result(pthread_cond_timedwait(condition(signal), mutex(lock), until));
}
void cnd_destroy(cnd_t *signal) {
  pthread_cond_destroy(condition(signal));
}
