// Loads sink modules and opens destinations with them. Knows no server: the background worker and the
// stand-alone publisher use it alike. Owning C++; the worker calls it outside of pg::call, since nothing here
// can jump.
//
// Modules are loaded with dlopen and RTLD_LOCAL, not by the server's loader: a sink carries no server magic,
// and the client library that it brings stays out of the symbol space of the process. They are never
// unloaded: client libraries leave threads and exit handlers behind.
#pragma once

#include <signal.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dispatcher.hpp"
#include "core/library_path.hpp"
#include "core/secret_mask.hpp"
#include "sink/abi.h"

namespace retrysafe::sink {

// The module in the library of that name (no folder, no suffix), or null and the reason in `error`. Loaded
// once per process.
const retrysafe_sink_module *load(const std::string &library, const LibraryPath &path, std::string *error);

// What a destination is opened with; copied by open.
struct Config {
  std::string destination;
  std::string database;
  std::vector<std::pair<std::string, std::string>> options;  // resolved
  SecretMask secrets;  // what nothing may show that a sink says: values of options that are masked
  std::string allowed_addresses;
  void (*log)(const char *message) = nullptr;
};

// Blocks signals while it lives. Every call of a sink has one around it; whoever makes many calls holds one
// himself, since each change of the mask is a system call.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked &) = delete;
  SignalsBlocked &operator=(const SignalsBlocked &) = delete;

 private:
  static inline thread_local int depth = 0;
  sigset_t before_;
};

// An open destination. Every call runs with signals blocked, so that the threads that client libraries start
// inherit the blocked mask: a signal that such a thread took would be lost to the process.
class Sink final : public SinkPort {
 public:
  // Null, and the reason in `error`, when the configuration cannot work.
  static std::unique_ptr<Sink> open(const retrysafe_sink_module *module, Config config, std::string *error);
  ~Sink() override;
  Sink(const Sink &) = delete;
  Sink &operator=(const Sink &) = delete;

  // Readable when step() of a dispatcher has something to do; the same for the life of the sink.
  int wait_fd() const;

  bool keeps_order() const override { return module_->flags & RETRYSAFE_SINK_KEEPS_ORDER; }
  bool submit(const retrysafe_event &event) override;
  void flush() override;
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) override;

 private:
  class Calling;
  static void log(const char *message);

  Sink(const retrysafe_sink_module *module, Config config) : module_(module), config_(std::move(config)) {}

  const retrysafe_sink_module *module_;
  Config config_;
  retrysafe_sink *handle_ = nullptr;
  static inline thread_local const Sink *calling = nullptr;
};

}  // namespace retrysafe::sink
