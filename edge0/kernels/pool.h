/* Threads that share a row of chunks: whoever is free takes the next one, so that a busy core delays nobody. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* Pauses before a thread sleeps, about 0.1 ms: longer than the caller is away between two calls of a step. */
#define SPINS 5000
#define POLITE 10 /* of them one gives way to whoever wants this core, such as a thread that reads */
#define SHARED_FROM 100000 /* bytes to go through, about 5 us of one thread, from which sharing them pays */

typedef void (*Task)(void *context, int chunk);

typedef struct {
  _Atomic uint64_t ticket; /* epoch << 40 | chunks << 20 | next chunk: a stale claim fails as a whole */
  _Atomic int done, sleepers, stop;
  Task task; /* of this epoch: they change only when all its chunks are done */
  void *context;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  pthread_t *threads;
  int count; /* threads beside the caller */
} Pool;

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int has_work(uint64_t ticket) { return (ticket & 0xfffff) < (ticket >> 20 & 0xfffff); }

/* Claims and runs chunks until none is left. */
static void pool_work(Pool *p) {
  uint64_t ticket = atomic_load(&p->ticket);
  while (has_work(ticket)) {
    if (!atomic_compare_exchange_weak(&p->ticket, &ticket, ticket + 1)) continue;
    p->task(p->context, (int)(ticket & 0xfffff));
    atomic_fetch_add(&p->done, 1);
    ticket = atomic_load(&p->ticket);
  }
}

static void *pool_thread(void *argument) {
  Pool *p = argument;
  for (;;) {
    for (int spins = 0; spins < SPINS && !has_work(atomic_load(&p->ticket)); spins++) {
      if (spins % POLITE)
        relax();
      else
        sched_yield();
    }
    if (!has_work(atomic_load(&p->ticket))) {
      pthread_mutex_lock(&p->lock);
      atomic_fetch_add(&p->sleepers, 1);
      while (!has_work(atomic_load(&p->ticket)) && !atomic_load(&p->stop)) pthread_cond_wait(&p->wake, &p->lock);
      atomic_fetch_sub(&p->sleepers, 1);
      pthread_mutex_unlock(&p->lock);
    }
    if (atomic_load(&p->stop)) return NULL;
    pool_work(p);
  }
}

static void pool_wake(Pool *p) {
  if (!atomic_load(&p->sleepers) && !atomic_load(&p->stop)) return;
  pthread_mutex_lock(&p->lock);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
}

/* Runs task(context, 0 .. chunks - 1), the caller with the others; returns when all are done. One caller at a time.
   `bytes`: what all chunks go through together. */
static void pool_run(Pool *p, Task task, void *context, int chunks, size_t bytes) {
  if (p->count == 0 || chunks < 2 || chunks > 0xfffff || bytes < SHARED_FROM) {
    for (int chunk = 0; chunk < chunks; chunk++) task(context, chunk);
    return;
  }
  p->task = task;
  p->context = context;
  atomic_store(&p->done, 0);
  uint64_t epoch = (atomic_load(&p->ticket) >> 40) + 1;
  atomic_store(&p->ticket, epoch << 40 | (uint64_t)chunks << 20);
  pool_wake(p);
  pool_work(p);
  for (int spins = 0; atomic_load(&p->done) < chunks; spins++) {
    if (spins < SPINS)
      relax();
    else
      sched_yield();
  }
}

/* `threads` with the caller; returns how many there are, fewer where the system gives no more. */
static int pool_start(Pool *p, int threads) {
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->wake, NULL);
  p->threads = calloc((size_t)(threads > 1 ? threads : 1), sizeof(pthread_t));
  while (p->threads && p->count < threads - 1 && !pthread_create(&p->threads[p->count], NULL, pool_thread, p)) p->count++;
  return p->count + 1;
}

static void pool_stop(Pool *p) {
  atomic_store(&p->stop, 1);
  pool_wake(p);
  for (int thread = 0; thread < p->count; thread++) pthread_join(p->threads[thread], NULL);
  free(p->threads);
  pthread_mutex_destroy(&p->lock);
  pthread_cond_destroy(&p->wake);
}
