// One destination of kind http, as its options describe it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/address_filter.hpp"
#include "sink/kit.hpp"
#include "sinks/http/webhook_signature.hpp"

namespace retrysafe::http {

struct Endpoint {
  // Throws std::invalid_argument: what is wrong with the options.
  explicit Endpoint(const sink::Options &options);

  std::string url;
  std::string host;  // of the URL, as the library reads it
  bool tls;
  std::string source;  // empty: the event's own
  std::string ca_file, cert_file, key_file, key_password;
  bool structured;
  bool http2;
  long timeout_ms;
  long connect_timeout_ms;
  size_t max_in_flight;
  size_t response_bytes;
  std::vector<std::string> header_lines;  // "Name: value", the same for every request
  std::vector<std::string> confidential;  // values that must not be shown
  AddressFilter addresses;
  std::optional<WebhookSigner> signer;
};

}  // namespace retrysafe::http
