#include "sinks/kafka/settings.hpp"

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "core/kinds/names.hpp"

namespace retrysafe::kafka {

namespace {

std::string_view trim(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

bool is_port(std::string_view digits) {
  unsigned port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  return error == std::errc{} && end == digits.data() + digits.size() && port > 0 && port <= 65535;
}

// HOST, HOST:PORT, [IPv6]:PORT. The library would pass over what it cannot read, without a word.
bool is_broker(std::string_view broker) {
  std::string_view host = broker;
  const size_t colon = broker.rfind(':');
  if (colon != std::string_view::npos && !broker.ends_with(']')) {
    host = broker.substr(0, colon);
    if (!is_port(broker.substr(colon + 1))) return false;
  }
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return !host.empty() && host.find_first_of(bracketed ? " /" : " /:[]") == std::string_view::npos;
}

std::string broker_list(std::string_view list) {
  std::string brokers;
  while (true) {
    const size_t comma = list.find(',');
    const std::string_view broker = trim(list.substr(0, comma));
    if (!is_broker(broker))
      throw std::invalid_argument("option \"brokers\" must be a list of HOST:PORT, separated by commas");
    brokers.append(brokers.empty() ? "" : ",").append(broker);
    if (comma == std::string_view::npos) return brokers;
    list.remove_prefix(comma + 1);
  }
}

// By what an event's key chooses its partition. Events without a key go anywhere.
std::string partitioner(std::string_view name) {
  if (name == "crc32") return "consistent_random";
  if (name == "fnv1a") return "fnv1a_random";
  return "murmur2_random";
}

std::string upper(std::string_view text) {
  std::string result(text);
  for (char &c : result)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return result;
}

}  // namespace

Settings::Settings(const sink::Options &options)
    : topic(options.required("topic"), kinds::topic_problem),
      source(options.text("source")),
      structured(options.text("mode") == "structured"),
      tls(options.flag("tls", false)),
      max_in_flight(static_cast<size_t>(options.number("max_in_flight", 1000))),
      max_message_bytes(static_cast<size_t>(options.number("max_message_bytes", 1'000'000))),
      connect_timeout(options.number("connect_timeout", 5'000)),
      timeout(options.number("timeout", 30'000)),
      addresses(options.allowed_addresses()) {
  const auto set = [&](const char *name, std::string value) {
    properties.emplace_back(name, std::move(value));
  };
  const auto set_number = [&](const char *name, long value) { set(name, std::to_string(value)); };

  // What is promised.
  set("enable.idempotence", "true");
  set("acks", "all");
  set("max.in.flight.requests.per.connection", "5");

  set("bootstrap.servers", broker_list(options.required("brokers")));
  set("client.id", std::string(options.text("client_id", "retrysafe")));
  set("partitioner", partitioner(options.text("partitioner")));
  set("compression.codec", std::string(options.text("compression", "none")));
  set_number("linger.ms", options.number("linger", 0));
  set_number("batch.size", options.number("batch_bytes", 65536));
  set_number("message.max.bytes", static_cast<long>(max_message_bytes));
  set_number("queue.buffering.max.messages", static_cast<long>(max_in_flight));
  // Of answers, which are short; the library takes the memory for one before it has come.
  set_number("receive.message.max.bytes", 16 * 1024 * 1024);
  set("socket.keepalive.enable", "true");
  set("socket.nagle.disable", "true");

  // Nothing may stay under way for longer: an event, a request of it, an attempt to connect.
  set_number("message.timeout.ms", timeout.count());
  set_number("request.timeout.ms", std::min(timeout.count(), 900'000L));
  set_number("socket.timeout.ms", std::min(timeout.count(), 300'000L));
  set_number("socket.connection.setup.timeout.ms", std::max(1000L, options.number("connect_timeout", 5'000)));
  // A topic that was just made is not known to every broker at once.
  set_number("topic.metadata.propagation.max.ms", 2000);

  const bool login = options.has("user") || options.has("password");
  if (!tls && (options.has("ca_file") || options.has("cert_file") || options.has("key_file")))
    throw std::invalid_argument("certificates need option \"tls\"");
  if (options.has("cert_file") != options.has("key_file"))
    throw std::invalid_argument("options \"cert_file\" and \"key_file\" go together");
  set("security.protocol", std::string(login ? "sasl_" : "") + (tls ? "ssl" : "plaintext"));
  if (tls) {
    // That it is the host's certificate: the default since version 2 only.
    set("ssl.endpoint.identification.algorithm", "https");
    if (options.has("ca_file")) set("ssl.ca.location", std::string(options.text("ca_file")));
    if (options.has("cert_file")) {
      set("ssl.certificate.location", std::string(options.text("cert_file")));
      set("ssl.key.location", std::string(options.text("key_file")));
      if (options.has("key_password")) set("ssl.key.password", std::string(options.text("key_password")));
    }
  }
  if (login) {
    set("sasl.mechanism", upper(options.required("sasl_mechanism")));
    set("sasl.username", std::string(options.required("user")));
    set("sasl.password", std::string(options.required("password")));
  }
}

}  // namespace retrysafe::kafka
