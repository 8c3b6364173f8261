// A configuration file of the relay, and the options in it.
#include "relay/configuration.hpp"

#include "core/kinds/kinds.hpp"
#include "input.hpp"
#include "relay/destination_options.hpp"

using namespace retrysafe;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string text(reinterpret_cast<const char *>(data), size);
  relay::Configuration configuration;
  try {
    relay::read_configuration(text, &configuration);
  } catch (const relay::ConfigurationError &error) {
    fuzz::require(std::string_view(error.what()).starts_with("line "));
    return 0;
  }
  fuzz::require(configuration.connections >= 1 && configuration.connections <= 256);
  configuration.configuration_directory = "/nonexistent";
  for (const relay::DestinationSection &section : configuration.destinations) {
    fuzz::require(!section.name.empty());
    const BuiltInKind *kind = find_built_in_kind(section.kind);
    if (!kind) continue;
    for (const bool complete : {false, true}) {
      try {
        (void)relay::options_of_section(section, kind->options, complete, configuration);
      } catch (const relay::ConfigurationError &) {
      }
    }
    for (const auto &[name, value] : section.options) {
      try {
        (void)relay::option_of_database(name, value, "file", true, configuration);
      } catch (const relay::ConfigurationError &) {
      }
    }
  }
  return 0;
}
