/*
 * A destination kind of its own, complete: appends one line of JSON per event to a file.
 *
 * docs/writing-a-sink.md explains it step by step. It needs the interface and nothing else of retrysafe:
 *
 *   cc -shared -fPIC -O2 -I"$(pg_config --includedir-server)/extension/retrysafe" -o file_sink.so file_sink.c
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <unistd.h>

#include <retrysafe_sink.h>

enum { kMaxEvents = 1000 };

/* What the interface calls retrysafe_sink is ours to define. */
struct retrysafe_sink {
  int file;
  int wake; /* readable while there are outcomes to collect */

  char *lines; /* of the events that are not written yet */
  size_t size, capacity;
  uint64_t taken[kMaxEvents]; /* their tags */
  size_t taken_count;

  retrysafe_outcome outcomes[kMaxEvents]; /* to be collected */
  size_t outcome_count;
};

/* --- the line of an event ----------------------------------------------------------------------------------
 */

/* False when there is no memory: the buffer is as it was then. */
static int append(retrysafe_sink *sink, const char *bytes, size_t size) {
  if (sink->size + size > sink->capacity) {
    const size_t capacity = 2 * (sink->size + size);
    char *lines = realloc(sink->lines, capacity);
    if (!lines) return 0;
    sink->lines = lines;
    sink->capacity = capacity;
  }
  if (size > 0) memcpy(sink->lines + sink->size, bytes, size);
  sink->size += size;
  return 1;
}

/* Text of an event is UTF-8 without NUL. JSON wants quotes, backslashes and control characters escaped. */
static int append_string(retrysafe_sink *sink, const char *name, retrysafe_text text) {
  int ok = append(sink, name, strlen(name)) && append(sink, "\"", 1);
  for (size_t i = 0; ok && i < text.size; ++i) {
    const unsigned char c = (unsigned char)text.data[i];
    char escaped[8];
    if (c == '"' || c == '\\')
      ok = append(sink, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\%c", c));
    else if (c < 0x20)
      ok = append(sink, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", c));
    else
      ok = append(sink, &text.data[i], 1);
  }
  return ok && append(sink, "\"", 1);
}

static int append_line(retrysafe_sink *sink, const retrysafe_event *event) {
  /* An absent text has no data, which is not the same as an empty one. The payload is JSON as it is. */
  const retrysafe_text null = {"null", 4};
  const retrysafe_text payload = event->payload.data ? event->payload : null;
  return append_string(sink, "{\"id\": ", event->id) && append_string(sink, ", \"type\": ", event->type) &&
         append_string(sink, ", \"time\": ", event->time) &&
         (!event->ordering_key.data || append_string(sink, ", \"key\": ", event->ordering_key)) &&
         append(sink, ", \"data\": ", 10) && append(sink, payload.data, payload.size) &&
         append(sink, "}\n", 2);
}

/* --- the interface -----------------------------------------------------------------------------------------
 */

/* Options were checked against the list that outbox_register_kind was given. */
static retrysafe_text option(const retrysafe_sink_config *config, const char *name) {
  for (size_t i = 0; i < config->option_count; ++i)
    if (config->options[i].name.size == strlen(name) &&
        memcmp(config->options[i].name.data, name, config->options[i].name.size) == 0)
      return config->options[i].value;
  return (retrysafe_text){NULL, 0};
}

static retrysafe_sink *open_sink(const retrysafe_sink_config *config, char *error, size_t error_size) {
  const retrysafe_text path = option(config, "path");
  char name[4096];
  snprintf(name, sizeof name, "%.*s", (int)path.size, path.data);
  retrysafe_sink *sink = calloc(1, sizeof *sink);
  if (!sink) {
    snprintf(error, error_size, "out of memory");
    return NULL;
  }
  sink->file = open(name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
  sink->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (sink->file >= 0 && sink->wake >= 0) return sink;
  /* Shown in outbox_status; the worker tries again later. */
  snprintf(error, error_size, "could not open file \"%s\": %s", name, strerror(errno));
  if (sink->file >= 0) close(sink->file);
  if (sink->wake >= 0) close(sink->wake);
  free(sink);
  return NULL;
}

static int wait_fd(retrysafe_sink *sink) {
  return sink->wake;
}

/* 0 asks to be offered the event again after the next collect. */
static int submit(retrysafe_sink *sink, const retrysafe_event *event) {
  if (sink->taken_count + sink->outcome_count >= kMaxEvents) return 0;
  const size_t before = sink->size;
  if (!append_line(sink, event)) {
    sink->size = before;
    return 0;
  }
  sink->taken[sink->taken_count++] = event->tag;
  return 1;
}

/* NULL when all is on disk, else why not; then nothing of it is in the file. */
static const char *write_lines(retrysafe_sink *sink) {
  const off_t end = lseek(sink->file, 0, SEEK_END);
  const char *reason = NULL;
  for (size_t written = 0; !reason && written < sink->size;) {
    const ssize_t n = write(sink->file, sink->lines + written, sink->size - written);
    if (n > 0) written += (size_t)n;
    if (n < 0 && errno != EINTR) reason = strerror(errno);
  }
  if (!reason && fdatasync(sink->file) != 0) reason = strerror(errno);
  if (reason && ftruncate(sink->file, end) != 0) return "what was written could not be taken back";
  return reason;
}

/* A destination with several shards has a sink for each, perhaps in several processes. */
static const char *write_lines_alone(retrysafe_sink *sink) {
  if (flock(sink->file, LOCK_EX) != 0) return strerror(errno);
  const char *reason = write_lines(sink);
  flock(sink->file, LOCK_UN);
  return reason;
}

/* "Delivered" is a promise: nobody sends the event again. So it is said after fdatasync, not after write.
 * What keeps the whole file from being written is no fault of an event: the destination is unreachable, and
 * no attempt counts. */
static void flush(retrysafe_sink *sink) {
  if (sink->taken_count == 0) return;
  const char *reason = write_lines_alone(sink);
  for (size_t i = 0; i < sink->taken_count; ++i) {
    retrysafe_outcome *outcome = &sink->outcomes[sink->outcome_count++];
    outcome->tag = sink->taken[i];
    outcome->status = reason ? RETRYSAFE_UNREACHABLE : RETRYSAFE_DELIVERED;
    outcome->retry_after_ms = -1;
    snprintf(outcome->reason, sizeof outcome->reason, "%s", reason ? reason : "");
  }
  sink->taken_count = 0;
  sink->size = 0;
  eventfd_write(sink->wake, 1);
}

static size_t collect(retrysafe_sink *sink, retrysafe_outcome *outcomes, size_t capacity, int *timeout_ms) {
  const size_t count = sink->outcome_count < capacity ? sink->outcome_count : capacity;
  memcpy(outcomes, sink->outcomes, count * sizeof *outcomes);
  sink->outcome_count -= count;
  memmove(sink->outcomes, sink->outcomes + count, sink->outcome_count * sizeof *outcomes);
  eventfd_t unused;
  if (sink->outcome_count == 0) eventfd_read(sink->wake, &unused);
  *timeout_ms = -1; /* nothing here happens by time */
  return count;
}

/* What was taken and not written has no outcome, and so it comes again. */
static void close_sink(retrysafe_sink *sink) {
  close(sink->file);
  close(sink->wake);
  free(sink->lines);
  free(sink);
}

static const retrysafe_sink_module module = {
    .magic = RETRYSAFE_SINK_MAGIC,
    .abi_version = RETRYSAFE_SINK_ABI_VERSION,
    .size = sizeof(retrysafe_sink_module),
    .flags = 0,
    .kind = "file",
    .open = open_sink,
    .wait_fd = wait_fd,
    .submit = submit,
    .flush = flush,
    .collect = collect,
    .close = close_sink,
};

const retrysafe_sink_module *entry(void) __asm__(RETRYSAFE_SINK_SYMBOL);
const retrysafe_sink_module *entry(void) {
  return &module;
}
