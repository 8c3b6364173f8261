#include "sink/host.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>

namespace retrysafe::sink {

namespace {

retrysafe_text text(std::string_view view) {
  return {view.data(), view.size()};
}

bool is_complete(const retrysafe_sink_module &module) {
  return module.kind && module.open && module.wait_fd && module.submit && module.flush && module.collect &&
         module.close;
}

}  // namespace

// Leaves those deliverable that tell of a fault of the thread itself.
SignalsBlocked::SignalsBlocked() {
  if (depth++ > 0) return;
  sigset_t blocked;
  sigfillset(&blocked);
  for (int number : {SIGTRAP, SIGABRT, SIGILL, SIGFPE, SIGSEGV, SIGBUS, SIGSYS, SIGCONT})
    sigdelset(&blocked, number);
  pthread_sigmask(SIG_BLOCK, &blocked, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  if (--depth == 0) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

const retrysafe_sink_module *load(const std::string &library, const LibraryPath &path, std::string *error) {
  if (library.empty() || library.find('/') != std::string::npos) {
    *error = "\"" + library + "\" is not the plain name of a library";
    return nullptr;
  }
  LibrarySearch search;
  find_library(library, path, &search);
  if (search.file[0] == '\0') {
    *error = "library \"" + library + ".so\" is not installed in " + search.folders;
    return nullptr;
  }
  const SignalsBlocked guard;
  void *handle = dlopen(search.file, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char *reason = dlerror();
    *error = "could not load library \"" + library + "\": " + (reason ? reason : "unknown reason");
    return nullptr;
  }
  const auto entry = reinterpret_cast<retrysafe_sink_module_fn>(dlsym(handle, RETRYSAFE_SINK_SYMBOL));
  const retrysafe_sink_module *module = entry ? entry() : nullptr;
  if (!module || module->magic != RETRYSAFE_SINK_MAGIC) {
    *error = "library \"" + library + "\" is not a sink of retrysafe";
    return nullptr;
  }
  if (module->abi_version != RETRYSAFE_SINK_ABI_VERSION || module->size != sizeof *module ||
      !is_complete(*module)) {
    *error = "library \"" + library + "\" was built for version " + std::to_string(module->abi_version) +
             " of the sink interface, this is version " + std::to_string(RETRYSAFE_SINK_ABI_VERSION);
    return nullptr;
  }
  return module;
}

// A call of the module. What it logs meanwhile is logged for this sink.
class Sink::Calling {
 public:
  explicit Calling(const Sink &sink) : before_(std::exchange(calling, &sink)) {}
  ~Calling() { calling = before_; }
  Calling(const Calling &) = delete;
  Calling &operator=(const Calling &) = delete;

 private:
  const SignalsBlocked blocked_;
  const Sink *before_;
};

void Sink::log(const char *message) {
  if (!calling || !calling->config_.log) return;
  std::string shown(message);
  calling->config_.secrets.apply(&shown);
  calling->config_.log(shown.c_str());
}

std::unique_ptr<Sink> Sink::open(const retrysafe_sink_module *module, Config config, std::string *error) {
  std::unique_ptr<Sink> sink(new Sink(module, std::move(config)));
  const Config &kept = sink->config_;
  std::vector<retrysafe_pair> options;
  options.reserve(kept.options.size());
  for (const auto &[name, value] : kept.options) options.push_back({text(name), text(value)});
  const retrysafe_sink_config c{
      .destination = text(kept.destination),
      .database = text(kept.database),
      .options = options.data(),
      .option_count = options.size(),
      .allowed_addresses = text(kept.allowed_addresses),
      .log = log,
  };
  char message[512] = "";
  const Calling call(*sink);
  sink->handle_ = module->open(&c, message, sizeof message);
  if (sink->handle_) return sink;
  *error = message[0] ? message : "the sink could not be opened";
  kept.secrets.apply(error);
  return nullptr;
}

Sink::~Sink() {
  const Calling call(*this);
  if (handle_) module_->close(handle_);
}

int Sink::wait_fd() const {
  return module_->wait_fd(handle_);
}

bool Sink::submit(const retrysafe_event &event) {
  const Calling call(*this);
  return module_->submit(handle_, &event) != 0;
}

void Sink::flush() {
  const Calling call(*this);
  module_->flush(handle_);
}

size_t Sink::collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
  const Calling call(*this);
  const size_t count = module_->collect(handle_, outcomes.data(), outcomes.size(), timeout_ms);
  for (retrysafe_outcome &outcome : outcomes.first(count)) {
    if (outcome.reason[0] == '\0') continue;
    std::string reason(outcome.reason, strnlen(outcome.reason, sizeof outcome.reason));
    config_.secrets.apply(&reason);
    reason.copy(outcome.reason, sizeof outcome.reason - 1);
    outcome.reason[std::min(reason.size(), sizeof outcome.reason - 1)] = '\0';
  }
  return count;
}

}  // namespace retrysafe::sink
