// Options of a destination as a sink gets them.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "input.hpp"
#include "sink/kit.hpp"

namespace retrysafe::fuzz {

class InputOptions {
 public:
  void add(std::string name, std::string value) {
    const auto &[kept_name, kept_value] = texts_.emplace_back(std::move(name), std::move(value));
    pairs_.push_back({{kept_name.data(), kept_name.size()}, {kept_value.data(), kept_value.size()}});
  }
  void add_unless_empty(std::string name, std::string value) {
    if (!value.empty()) add(std::move(name), std::move(value));
  }

  // Valid while these are.
  sink::Options with_addresses(std::string_view allowed) {
    config_.destination = {"fuzzed", 6};
    config_.database = {"shop", 4};
    config_.options = pairs_.data();
    config_.option_count = pairs_.size();
    config_.allowed_addresses = {allowed.data(), allowed.size()};
    config_.log = [](const char *) {};
    return sink::Options(config_);
  }

 private:
  std::deque<std::pair<std::string, std::string>> texts_;
  std::vector<retrysafe_pair> pairs_;
  retrysafe_sink_config config_{};
};

}  // namespace retrysafe::fuzz
