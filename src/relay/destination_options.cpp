#include "relay/destination_options.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>

#include "relay/file.hpp"

namespace retrysafe::relay {

namespace {

constexpr size_t kMaxSecretBytes = 64 * 1024;

// Errors show the file as it is `called`: some are shown in the database.
std::string read_secret(const std::string &option, const std::filesystem::path &path,
                        const std::string &called) {
  const auto refuse = [&](const std::string &why) {
    throw ConfigurationError("the file " + called + " of option \"" + option + "\" " + why);
  };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    refuse("is not a plain file");
  if (std::filesystem::is_regular_file(status) && std::filesystem::file_size(path, error) > kMaxSecretBytes)
    refuse("has more than 64 kB");
  auto text = read_whole_file(path.c_str());
  if (!text) refuse(std::string("cannot be read: ") + std::strerror(errno));
  std::string secret = *std::move(text);
  while (secret.ends_with('\n') || secret.ends_with('\r')) secret.pop_back();
  if (secret.empty() || secret.find('\0') != std::string::npos) refuse("is empty or not text");
  return secret;
}

std::string read_variable(const std::string &option, const std::string &variable) {
  const char *value = variable.starts_with(kEnvironmentPrefix) ? std::getenv(variable.c_str()) : nullptr;
  if (!value || !*value)
    throw ConfigurationError("the environment variable of option \"" + option + "\" is not set: " + variable);
  return value;
}

// Who may make destinations must not get at any file of this machine.
std::filesystem::path below_secret_directory(const std::string &option, const std::string &given,
                                             const std::string &directory) {
  if (directory.empty())
    throw ConfigurationError(
        "option \"" + option +
        "\" of the database names a file, and there is no secret_directory to find it in");
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::canonical(directory, error);
  std::filesystem::path file =
      error ? std::filesystem::path() : std::filesystem::canonical(folder / given, error);
  if (error)
    throw ConfigurationError("the file of option \"" + option + "\" cannot be found in secret_directory");
  if (std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first != folder.end())
    throw ConfigurationError("option \"" + option +
                             "\" of the database names a file outside of secret_directory");
  return file;
}

JsonKind kind_of(const OptionName &name, std::string_view value) {
  if (!name.description || name.source != OptionSource::kInline) return JsonKind::kString;
  if (name.description->type == OptionType::kInteger) return JsonKind::kNumber;
  if (name.description->type == OptionType::kBoolean && (value == "true" || value == "false"))
    return JsonKind::kBoolean;
  return JsonKind::kString;
}

}  // namespace

Options options_of_section(const DestinationSection &section, OptionList list, bool complete,
                           const Configuration &configuration) {
  std::vector<GivenOption> given;
  std::deque<std::pair<std::string_view, std::vector<GivenOption>>> objects;  // members of headers
  for (const auto &[name, value] : section.options) {
    const size_t dot = name.find('.');
    if (dot == std::string::npos) {
      given.push_back({name, kind_of(find_option(list, name), value), value, {}});
      continue;
    }
    const std::string_view object = std::string_view(name).substr(0, dot);
    auto known =
        std::find_if(objects.begin(), objects.end(), [&](const auto &o) { return o.first == object; });
    if (known == objects.end()) known = objects.insert(objects.end(), {object, {}});
    known->second.push_back({std::string_view(name).substr(dot + 1), JsonKind::kString, value, {}});
  }
  for (const auto &[name, members] : objects) given.push_back({name, JsonKind::kObject, {}, members});

  // What is required, or needed by another option, may be in the database.
  std::vector<OptionDescription> checked(list.begin(), list.end());
  for (OptionDescription &option : checked)
    if (!complete) option.required = false, option.needs = {}, option.default_value = {};
  OptionProblem problem;
  if (!check_options(checked, given, &problem))
    throw ConfigurationError("destination \"" + section.name + "\": " + problem.message +
                             (problem.hint[0] ? std::string(". ") + problem.hint : std::string()));
  Options options;
  for_each_option(
      checked, given, [&](const OptionName &name, std::string_view member, std::string_view text) {
        std::string option(name.description->name), value(text);
        if (name.source == OptionSource::kEnvironment) value = read_variable(option, value);
        if (name.source == OptionSource::kServerFile) {
          const std::filesystem::path path =
              std::filesystem::path(configuration.configuration_directory) / value;
          value = name.description->type == OptionType::kFile ? path.string()
                                                              : read_secret(option, path, path.string());
        }
        if (member.data()) option.append(".").append(member);
        options.emplace_back(std::move(option), std::move(value));
      });
  return options;
}

std::string option_of_database(const std::string &name, const std::string &value, std::string_view source,
                               bool is_secret, const Configuration &configuration) {
  if (source == "environment") return read_variable(name, value);
  if (source != "file") return value;
  const std::filesystem::path path = below_secret_directory(name, value, configuration.secret_directory);
  return is_secret ? read_secret(name, path, value) : path.string();
}

void merge(Options over, Options *under) {
  for (auto &option : over) {
    const auto same =
        std::find_if(under->begin(), under->end(), [&](const auto &o) { return o.first == option.first; });
    if (same != under->end())
      same->second = std::move(option.second);
    else
      under->push_back(std::move(option));
  }
}

}  // namespace retrysafe::relay
