#include "relay/command_line.hpp"

#include <getopt.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "relay/file.hpp"
#include "relay/session.hpp"

namespace retrysafe::relay {

namespace {

constexpr std::string_view help =
    "retrysafe-relay publishes the events of retrysafe from outside of the database server.\n"
    "\n"
    "Usage:\n"
    "  retrysafe-relay [OPTION]... [DESTINATION]...\n"
    "\n"
    "It publishes to the named destinations, and to those that have a section in the configuration file.\n"
    "\n"
    "Options:\n"
    "  -d, --connection=CONNSTR        database to connect to, as a connection string or URI; hosts may be "
    "several\n"
    "  -c, --config=FILE               read settings and destinations from FILE\n"
    "  -n, --connections=N             connections for each destination, 1 to 256 (default 1)\n"
    "      --once                      publish at most one batch on each connection, then exit\n"
    "      --drain                     publish what can be published now, then exit\n"
    "      --check                     check connection, destinations and options, publish nothing, exit\n"
    "      --log-format=FORMAT         text or json (default text)\n"
    "      --log-level=LEVEL           debug, info, warning or error (default info)\n"
    "      --statistics-interval=TIME  log counts so often, 0s: never (default 60s)\n"
    "      --stop-timeout=TIME         when stopping, wait so long for what is being sent (default 5s)\n"
    "      --allowed-addresses=LIST    addresses, ranges and hosts beyond public ones that may be connected "
    "to\n"
    "      --secret-directory=DIR      where files are that options of the database name\n"
    "      --library-path=PATH         folders of the libraries of destinations, separated by colons\n"
    "  -V, --version                   show the version, then exit\n"
    "  -h, --help                      show this help, then exit\n"
    "\n"
    "Exit status: 0 done or stopped by SIGTERM or SIGINT; 1 unexpected fault; 2 wrong options or "
    "configuration;\n"
    "3 the database cannot be reached or refuses; 4 with --once or --drain, something was not delivered.\n"
    "\n"
    "A password does not belong on the command line: use the configuration file, ~/.pgpass or PGPASSFILE.\n";

void print(std::string_view text) {
  (void)!write(STDOUT_FILENO, text.data(), text.size());
}

void read_file(const char *path, Configuration *configuration) {
  const auto text = read_whole_file(path);
  if (!text)
    throw ConfigurationError(std::string("cannot read the configuration file ") + path + ": " +
                             std::strerror(errno));
  configuration->configuration_directory = std::filesystem::absolute(path).parent_path().string();
  try {
    read_configuration(*text, configuration);
  } catch (const ConfigurationError &error) {
    throw ConfigurationError(std::string(path).append(": ").append(error.what()));
  }
}

}  // namespace

std::optional<Configuration> read_command_line(int count, char **arguments) {
  enum { kOnce = 256, kDrain, kCheck, kSetting };
  static const option options[] = {{"connection", required_argument, nullptr, 'd'},
                                   {"config", required_argument, nullptr, 'c'},
                                   {"connections", required_argument, nullptr, 'n'},
                                   {"once", no_argument, nullptr, kOnce},
                                   {"drain", no_argument, nullptr, kDrain},
                                   {"check", no_argument, nullptr, kCheck},
                                   {"log-format", required_argument, nullptr, kSetting},
                                   {"log-level", required_argument, nullptr, kSetting},
                                   {"statistics-interval", required_argument, nullptr, kSetting},
                                   {"stop-timeout", required_argument, nullptr, kSetting},
                                   {"allowed-addresses", required_argument, nullptr, kSetting},
                                   {"secret-directory", required_argument, nullptr, kSetting},
                                   {"library-path", required_argument, nullptr, kSetting},
                                   {"version", no_argument, nullptr, 'V'},
                                   {"help", no_argument, nullptr, 'h'},
                                   {nullptr, 0, nullptr, 0}};
  Configuration configuration;
  std::vector<std::pair<std::string, std::string>> settings;  // go before those of the file
  const char *file = nullptr;
  const auto set_mode = [&](Mode mode) {
    if (configuration.mode != Mode::kService)
      throw ConfigurationError("--once, --drain and --check exclude each other");
    configuration.mode = mode;
  };
  int which = 0;
  for (int letter; (letter = getopt_long(count, arguments, "d:c:n:Vh", options, &which)) != -1;) {
    switch (letter) {
      case 'd':
        if (Hosts(optarg).has_password()) {
          std::memset(optarg, 'x', std::strlen(optarg));  // others see it in the list of processes
          throw ConfigurationError(
              "a password on the command line is seen by others: use the configuration file or ~/.pgpass");
        }
        settings.emplace_back("connection", optarg);
        break;
      case 'c':
        file = optarg;
        break;
      case 'n':
        settings.emplace_back("connections", optarg);
        break;
      case kOnce:
        set_mode(Mode::kOnce);
        break;
      case kDrain:
        set_mode(Mode::kDrain);
        break;
      case kCheck:
        set_mode(Mode::kCheck);
        break;
      case kSetting: {
        std::string name = options[which].name;
        for (char &c : name)
          if (c == '-') c = '_';
        // What is wrong with all the rest is said in it, too.
        if (const auto format = name == "log_format" ? format_named(optarg) : std::nullopt)
          set_up_log(*format, Level::kInfo);
        settings.emplace_back(std::move(name), optarg);
        break;
      }
      case 'V':
        print("retrysafe-relay " RETRYSAFE_VERSION "\n");
        return std::nullopt;
      case 'h':
        print(help);
        return std::nullopt;
      default:
        throw ConfigurationError("try --help");
    }
  }
  if (file) read_file(file, &configuration);
  for (const auto &[name, value] : settings) (void)set(name, value, &configuration);
  for (int i = optind; i < count; ++i) (void)section(arguments[i], &configuration);
  if (configuration.destinations.empty())
    throw ConfigurationError("name a destination, or a configuration file that does; try --help");
  return configuration;
}

}  // namespace retrysafe::relay
