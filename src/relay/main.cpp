// retrysafe-relay: publishes from outside of the database server. README.md tells how it works.
#include <signal.h>
#include <sys/signalfd.h>

#include <exception>

#include "relay/command_line.hpp"
#include "relay/relay.hpp"

using namespace retrysafe::relay;

int main(int count, char **arguments) {
  try {
    // Client libraries start threads, which inherit the blocked signals: they come to the loop and to nobody
    // else.
    sigset_t ours;
    sigemptyset(&ours);
    for (const int number : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&ours, number);
    sigprocmask(SIG_BLOCK, &ours, nullptr);
    signal(SIGPIPE, SIG_IGN);
    const auto configuration = read_command_line(count, arguments);
    if (!configuration) return kExitDone;
    set_up_log(configuration->log_format, configuration->log_level);
    const Hosts hosts(configuration->connection);
    Relay relay(*configuration, hosts, signalfd(-1, &ours, SFD_NONBLOCK | SFD_CLOEXEC));
    return relay.run();
  } catch (const ConfigurationError &error) {
    log(Level::kError, error.what());
    return kExitConfiguration;
  } catch (const std::exception &error) {
    log(Level::kError, "unexpected fault", {{"reason", error.what()}});
    return kExitFault;
  }
}
