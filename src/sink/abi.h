/*
 * The C interface between a publisher and a sink.
 *
 * A sink is a shared library that delivers events to one kind of destination. It is loaded by the background
 * worker, or by a stand-alone publisher; it knows nothing of the server. All calls come from one thread. No
 * call blocks for longer than a few milliseconds: the sink does its network work without blocking, and tells
 * through wait_fd when it wants to be called again. No C++ exception may leave a call. A sink may run threads
 * of its own (client libraries do); they must have all signals blocked, which a thread inherits that is
 * started in a call, and must not call back.
 *
 * Text is UTF-8, given as pointer and length, not terminated by NUL unless said so.
 */
#ifndef RETRYSAFE_SINK_ABI_H
#define RETRYSAFE_SINK_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RETRYSAFE_SINK_MAGIC 0x52535331u /* "RSS1" */
#define RETRYSAFE_SINK_ABI_VERSION 1u
#define RETRYSAFE_SINK_SYMBOL "retrysafe_sink_module"

typedef struct retrysafe_text {
  const char *data; /* NULL: absent, which differs from empty */
  size_t size;
} retrysafe_text;

typedef struct retrysafe_pair {
  retrysafe_text name;
  retrysafe_text value;
} retrysafe_pair;

/* One option of a destination, already checked against the kind's list; secrets are resolved. */
typedef struct retrysafe_sink_config {
  retrysafe_text destination; /* name of the destination, for messages */
  retrysafe_text database;    /* name of the database it belongs to */
  const retrysafe_pair *options;
  size_t option_count;
  /* retrysafe.allowed_addresses: comma-separated CIDR ranges and host names beyond public addresses. */
  retrysafe_text allowed_addresses;
  /* For log lines; the text is terminated by NUL. Main thread only. */
  void (*log)(const char *message);
} retrysafe_sink_config;

/* An event. It stays where it is, as does what it points to, until its outcome was collected or the sink
 * closed. */
typedef struct retrysafe_event {
  uint64_t tag;      /* names the event in the outcome; unique among the events in flight */
  retrysafe_text id; /* UUID, 36 characters: the same for every copy of this event */
  retrysafe_text type;
  retrysafe_text source;       /* CloudEvents source: "retrysafe/DATABASE/SCOPE" unless configured */
  retrysafe_text time;         /* RFC 3339, UTC, microseconds */
  retrysafe_text ordering_key; /* absent: no order wanted */
  retrysafe_text event_key;
  retrysafe_text scope;
  retrysafe_text payload;        /* JSON text; absent for an SQL null */
  const retrysafe_pair *headers; /* as given to outbox_emit, traceparent included */
  size_t header_count;
  int32_t attempt; /* 1 for the first */
} retrysafe_event;

typedef enum retrysafe_status {
  RETRYSAFE_DELIVERED = 0,
  RETRYSAFE_FAILED_RETRY = 1, /* this event failed, a later try may succeed */
  RETRYSAFE_FAILED_FINAL = 2, /* this event can never be delivered */
  RETRYSAFE_UNREACHABLE = 3   /* the destination as a whole: says nothing about the event */
} retrysafe_status;

typedef struct retrysafe_outcome {
  uint64_t tag;
  int32_t status;         /* retrysafe_status */
  int32_t retry_after_ms; /* wanted by the far side, -1: not given */
  char reason[256];       /* UTF-8, terminated by NUL, without secrets; empty when delivered */
} retrysafe_outcome;

typedef struct retrysafe_sink retrysafe_sink; /* the sink's own */

/* What a sink promises; bits of `flags`. */
/* Several events of one ordering key may be in flight: they arrive in order, and after a failure no later
 * event of that key is delivered. */
#define RETRYSAFE_SINK_KEEPS_ORDER 1u

typedef struct retrysafe_sink_module {
  uint32_t magic;       /* RETRYSAFE_SINK_MAGIC */
  uint32_t abi_version; /* RETRYSAFE_SINK_ABI_VERSION */
  uint32_t size;        /* sizeof(retrysafe_sink_module) */
  uint32_t flags;
  const char *kind;

  /* Opens a destination without waiting for the network. Returns NULL and fills `error` (NUL-terminated) when
   * the configuration cannot work; a far side that is down is not an error of open. */
  retrysafe_sink *(*open)(const retrysafe_sink_config *config, char *error, size_t error_size);

  /* A descriptor that becomes readable when the sink has work to do or outcomes to give; the same for the
   * life of the sink. (An epoll descriptor serves.) */
  int (*wait_fd)(retrysafe_sink *sink);

  /* Takes one event. Returns 1 when taken, 0 when the sink is full: collect, then offer it again. */
  int (*submit)(retrysafe_sink *sink, const retrysafe_event *event);

  /* No more events follow for now: sinks that gather events send what they have. Collect is called next,
   * before anybody waits for wait_fd. */
  void (*flush)(retrysafe_sink *sink);

  /* Works without blocking and hands over up to `capacity` outcomes; returns their number. `*timeout_ms`
   * becomes the time after which collect wants to be called again even if wait_fd stays silent, -1 for none.
   */
  size_t (*collect)(retrysafe_sink *sink, retrysafe_outcome *outcomes, size_t capacity, int *timeout_ms);

  /* Gives up everything in flight and frees the sink, within milliseconds. */
  void (*close)(retrysafe_sink *sink);
} retrysafe_sink_module;

/* Exported by the library under the name RETRYSAFE_SINK_SYMBOL. */
typedef const retrysafe_sink_module *(*retrysafe_sink_module_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
