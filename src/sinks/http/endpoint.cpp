#include "sinks/http/endpoint.hpp"

#include <curl/curl.h>
#include <strings.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "sinks/http/tls_meter.hpp"

namespace retrysafe::http {

namespace {

constexpr std::string_view kHeaderOption = "headers.";
// Shorter ones would turn half of an answer into asterisks.
constexpr size_t kShortestSecret = 6;

// What a request says about its own framing, and what is made from the event, is not for options to change.
bool is_ours(const std::string &name) {
  for (const char *ours : {"connection", "content-length", "content-type", "expect", "te", "trailer",
                           "transfer-encoding", "upgrade"})
    if (strcasecmp(name.c_str(), ours) == 0) return true;
  return strncasecmp(name.c_str(), "ce-", 3) == 0 || strncasecmp(name.c_str(), "webhook-", 8) == 0;
}

std::string part(CURLU *url, CURLUPart which) {
  char *text = nullptr;
  if (curl_url_get(url, which, &text, 0) != CURLUE_OK) return {};
  const std::unique_ptr<char, void (*)(void *)> owner(text, curl_free);
  return text;
}

void read_url(const std::string &text, Endpoint *endpoint) {
  const std::unique_ptr<CURLU, void (*)(CURLU *)> url(curl_url(), curl_url_cleanup);
  const CURLUcode code = curl_url_set(url.get(), CURLUPART_URL, text.c_str(), CURLU_DISALLOW_USER);
  if (code != CURLUE_OK)
    throw std::invalid_argument(std::string("option \"url\" is not a usable URL: ") +
                                curl_url_strerror(code));
  const std::string scheme = part(url.get(), CURLUPART_SCHEME);
  if (scheme != "http" && scheme != "https")
    throw std::invalid_argument("option \"url\" must begin with http:// or https://");
  endpoint->url = text;
  endpoint->tls = scheme == "https";
  endpoint->host = part(url.get(), CURLUPART_HOST);
}

}  // namespace

Endpoint::Endpoint(const sink::Options &options)
    : source(options.text("source")),
      ca_file(options.text("ca_file")),
      cert_file(options.text("cert_file")),
      key_file(options.text("key_file")),
      key_password(options.text("key_password")),
      structured(options.text("mode") == "structured"),
      http2(options.flag("http2", true) && TlsMeter::works()),
      timeout_ms(options.number("timeout", 30'000)),
      connect_timeout_ms(options.number("connect_timeout", 5'000)),
      max_in_flight(static_cast<size_t>(options.number("max_in_flight", 32))),
      response_bytes(static_cast<size_t>(options.number("response_bytes", 65536))),
      addresses(options.allowed_addresses()) {
  read_url(std::string(options.required("url")), this);
  if (!tls && (!ca_file.empty() || !cert_file.empty() || !key_file.empty()))
    throw std::invalid_argument("certificates need a URL that begins with https://");
  if (cert_file.empty() != key_file.empty())
    throw std::invalid_argument("options \"cert_file\" and \"key_file\" need each other");
  const auto keep_secret = [&](std::string_view value) {
    if (value.size() >= kShortestSecret) confidential.emplace_back(value);
  };
  if (const std::string_view given = options.text("authorization");
      std::any_of(given.begin(), given.end(),
                  [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7f; }))
    throw std::invalid_argument("option \"authorization\" holds a control character");
  const auto add_header = [&](const std::string &name, std::string_view value) {
    // libcurl reads "Name:" as the wish to leave the header out, "Name;" as one without a value.
    header_lines.push_back(value.empty() ? name + ";" : name + ": " + std::string(value));
    keep_secret(value);
    // "Bearer TOKEN": the far side may give back the token alone.
    if (const size_t blank = value.find(' '); blank != std::string_view::npos)
      keep_secret(value.substr(blank + 1));
  };
  for (const retrysafe_pair &option : options.all()) {
    const std::string_view name = sink::view(option.name), value = sink::view(option.value);
    if (!name.starts_with(kHeaderOption)) continue;
    const std::string header(name.substr(kHeaderOption.size()));
    if (is_ours(header)) throw std::invalid_argument("header \"" + header + "\" cannot be set by an option");
    if (options.has("authorization") && strcasecmp(header.c_str(), "authorization") == 0)
      throw std::invalid_argument("option \"authorization\" and header \"" + header + "\" are the same");
    add_header(header, value);
  }
  if (options.has("authorization")) add_header("Authorization", options.text("authorization"));
  if (options.has("secret")) {
    signer.emplace(options.text("secret"));
    keep_secret(options.text("secret"));
  }
}

}  // namespace retrysafe::http
