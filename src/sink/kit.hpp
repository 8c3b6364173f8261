// For authors of sinks in C++: turns a class into the callbacks of the C interface. Header-only, no
// dependency.
//
//   class MySink {
//    public:
//     explicit MySink(const retrysafe::sink::Options &options);  // throws std::exception: the reason
//     int wait_fd() const;
//     bool submit(const retrysafe_event &event);                 // false: full
//     void flush();
//     size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms);
//   };
//   RETRYSAFE_SINK(MySink, "mine", 0)
//
// The destructor closes. An exception out of a member is caught at the border and logged; it must leave the
// object in a state in which the next call works.
#pragma once

#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "sink/abi.h"

namespace retrysafe::sink {

inline std::string_view view(const retrysafe_text &text) {
  return {text.data, text.size};
}

// Options of a destination by name. They were checked before: what is wrong here is a fault of a program.
class Options {
 public:
  explicit Options(const retrysafe_sink_config &config) : config_(config) {}

  std::string_view destination() const { return view(config_.destination); }
  std::string_view database() const { return view(config_.database); }
  std::string_view allowed_addresses() const { return view(config_.allowed_addresses); }
  void (*log() const)(const char *) { return config_.log; }

  std::span<const retrysafe_pair> all() const { return {config_.options, config_.option_count}; }

  bool has(std::string_view name) const { return find(name) != nullptr; }

  std::string_view text(std::string_view name, std::string_view otherwise = {}) const {
    const retrysafe_pair *option = find(name);
    return option ? view(option->value) : otherwise;
  }

  std::string_view required(std::string_view name) const {
    if (!has(name)) throw std::invalid_argument("option \"" + std::string(name) + "\" is missing");
    return text(name);
  }

  long number(std::string_view name, long otherwise) const {
    const std::string_view digits = text(name);
    if (digits.empty()) return otherwise;
    long value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size())
      throw std::invalid_argument("option \"" + std::string(name) + "\" is not a number");
    return value;
  }

  bool flag(std::string_view name, bool otherwise) const {
    return has(name) ? text(name) == "true" : otherwise;
  }

 private:
  const retrysafe_pair *find(std::string_view name) const {
    for (const retrysafe_pair &option : all())
      if (view(option.name) == name) return &option;
    return nullptr;
  }

  const retrysafe_sink_config &config_;
};

// Fills an outcome; cuts the reason where it does not fit, between characters.
inline void report(retrysafe_outcome *outcome, uint64_t tag, retrysafe_status status,
                   std::string_view reason = {}, int32_t retry_after_ms = -1) {
  size_t size = reason.size() < sizeof outcome->reason ? reason.size() : sizeof outcome->reason - 1;
  while (size > 0 && size < reason.size() && (static_cast<unsigned char>(reason[size]) & 0xc0) == 0x80)
    --size;
  outcome->tag = tag;
  outcome->status = status;
  outcome->retry_after_ms = retry_after_ms;
  if (size > 0) std::memcpy(outcome->reason, reason.data(), size);
  outcome->reason[size] = '\0';
}

template <class S>
struct Callbacks {
  // `retrysafe_sink` is the sink's own type, and this is where it gets it.
  struct Handle {
    Handle(const retrysafe_sink_config &config, const Options &options) : log(config.log), sink(options) {}
    void (*log)(const char *);
    S sink;
  };

  static Handle *own(retrysafe_sink *handle) { return reinterpret_cast<Handle *>(handle); }

  template <class Body>
  static auto guarded(retrysafe_sink *handle, Body &&body, decltype(body()) otherwise) noexcept {
    try {
      return body();
    } catch (const std::exception &error) {
      own(handle)->log(error.what());
    } catch (...) {
      own(handle)->log("unknown exception in a sink");
    }
    return otherwise;
  }

  static retrysafe_sink *open(const retrysafe_sink_config *config, char *error, size_t error_size) noexcept {
    try {
      return reinterpret_cast<retrysafe_sink *>(new Handle(*config, Options(*config)));
    } catch (const std::exception &exception) {
      std::snprintf(error, error_size, "%s", exception.what());
    } catch (...) {
      std::snprintf(error, error_size, "unknown exception");
    }
    return nullptr;
  }

  static int wait_fd(retrysafe_sink *handle) noexcept { return own(handle)->sink.wait_fd(); }

  static int submit(retrysafe_sink *handle, const retrysafe_event *event) noexcept {
    return guarded(
        handle, [&] { return own(handle)->sink.submit(*event) ? 1 : 0; }, 0);
  }

  static void flush(retrysafe_sink *handle) noexcept {
    guarded(
        handle, [&] { return own(handle)->sink.flush(), 0; }, 0);
  }

  static size_t collect(retrysafe_sink *handle, retrysafe_outcome *outcomes, size_t capacity,
                        int *timeout_ms) noexcept {
    *timeout_ms = 100;  // after an exception: soon again
    return guarded(
        handle,
        [&] {
          return own(handle)->sink.collect({outcomes, capacity}, timeout_ms);
        },
        size_t{0});
  }

  static void close(retrysafe_sink *handle) noexcept { delete own(handle); }
};

}  // namespace retrysafe::sink

#define RETRYSAFE_SINK(class_name, kind_name, flag_bits)                            \
  extern "C" __attribute__((visibility("default"))) const retrysafe_sink_module *   \
  retrysafe_sink_module_entry(void) __asm__(RETRYSAFE_SINK_SYMBOL);                 \
  const retrysafe_sink_module *retrysafe_sink_module_entry(void) {                  \
    using C = retrysafe::sink::Callbacks<class_name>;                               \
    static constexpr retrysafe_sink_module module = {RETRYSAFE_SINK_MAGIC,          \
                                                     RETRYSAFE_SINK_ABI_VERSION,    \
                                                     sizeof(retrysafe_sink_module), \
                                                     flag_bits,                     \
                                                     kind_name,                     \
                                                     C::open,                       \
                                                     C::wait_fd,                    \
                                                     C::submit,                     \
                                                     C::flush,                      \
                                                     C::collect,                    \
                                                     C::close};                     \
    return &module;                                                                 \
  }
