#include "sink/host.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <stdexcept>

#include "sink/kit.hpp"

namespace sink = retrysafe::sink;

namespace {

// Made into a module by the kit, opened by the host: both sides of the interface.
class EchoSink {
 public:
  explicit EchoSink(const sink::Options &options) {
    if (options.has("complain")) throw std::invalid_argument("not " + std::string(options.text("complain")));
    if (options.flag("broken", false)) throw std::invalid_argument("option \"broken\" is set");
    seen = std::string(options.destination()) + "/" + std::string(options.database()) + "/" +
           std::string(options.text("greeting", "none")) + "/" +
           std::to_string(options.number("number", -1)) + "/" + std::string(options.allowed_addresses());
    note_call();
  }
  ~EchoSink() {
    note_call();
    ++closed;
  }
  int wait_fd() const { return 77; }
  bool submit(const retrysafe_event &event) {
    note_call();
    if (event.tag == 13) throw std::runtime_error("unlucky");
    tag = event.tag;
    return event.tag != 0;
  }
  void flush() {
    note_call();
    ++flushed;
    if (!answer.empty()) throw std::runtime_error(answer);
  }
  size_t collect(std::span<retrysafe_outcome> outcomes, int *timeout_ms) {
    note_call();
    *timeout_ms = 5;
    sink::report(&outcomes[0], tag, RETRYSAFE_FAILED_RETRY,
                 answer.empty() ? std::string(300, 'x') + "\xc3\xa9" : answer, 9);
    return 1;
  }

  uint64_t tag = 0;
  static inline std::string seen, answer;
  static inline int flushed = 0, closed = 0;
  static inline int calls = 0, calls_with_signals_blocked = 0;

 private:
  static void note_call() {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    ++calls;
    if (sigismember(&mask, SIGTERM) && sigismember(&mask, SIGURG) && !sigismember(&mask, SIGSEGV))
      ++calls_with_signals_blocked;
  }
};

std::string last_log;

}  // namespace

RETRYSAFE_SINK(EchoSink, "echo", RETRYSAFE_SINK_KEEPS_ORDER)

namespace {

std::unique_ptr<sink::Sink> open(std::vector<std::pair<std::string, std::string>> options,
                                 std::string *error) {
  sink::Config config;
  config.destination = "orders";
  config.database = "shop";
  config.options = std::move(options);
  config.allowed_addresses = "10.0.0.0/8";
  config.secrets.add("hunter2");
  config.log = [](const char *line) { last_log = line; };
  return sink::Sink::open(retrysafe_sink_module_entry(), std::move(config), error);
}

bool blocked(int number) {
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  return sigismember(&mask, number) == 1;
}

class Folder {
 public:
  Folder() { path = mkdtemp(name_); }
  ~Folder() { std::system(("rm -rf '" + path + "'").c_str()); }
  void write(const std::string &file, const std::string &text) { std::ofstream(path + "/" + file) << text; }
  std::string path;

 private:
  char name_[32] = "/tmp/sink-host-test-XXXXXX";
};

std::string load_error(const std::string &library, const retrysafe::LibraryPath &path) {
  std::string error;
  EXPECT_EQ(sink::load(library, path, &error), nullptr);
  return error;
}

}  // namespace

TEST(SinkHost, OpensWithTheOptions) {
  std::string error;
  const auto one = open({{"greeting", "hello"}, {"number", "42"}}, &error);
  ASSERT_TRUE(one) << error;
  EXPECT_EQ(EchoSink::seen, "orders/shop/hello/42/10.0.0.0/8");
  EXPECT_EQ(one->wait_fd(), 77);
  EXPECT_TRUE(one->keeps_order());
}

TEST(SinkHost, PassesCallsOn) {
  std::string error;
  auto one = open({}, &error);
  retrysafe_event event{};
  event.tag = 0;
  EXPECT_FALSE(one->submit(event));
  event.tag = 7;
  EXPECT_TRUE(one->submit(event));
  const int before = EchoSink::flushed;
  one->flush();
  EXPECT_EQ(EchoSink::flushed, before + 1);
  retrysafe_outcome outcomes[2];
  int timeout = -1;
  EXPECT_EQ(one->collect(outcomes, &timeout), 1u);
  EXPECT_EQ(timeout, 5);
  EXPECT_EQ(outcomes[0].tag, 7u);
  EXPECT_EQ(outcomes[0].retry_after_ms, 9);
  EXPECT_EQ(std::string(outcomes[0].reason), std::string(255, 'x'));
  const int closed = EchoSink::closed;
  one.reset();
  EXPECT_EQ(EchoSink::closed, closed + 1);
}

// So that no thread that a sink starts in one of them takes a signal.
TEST(SinkHost, SignalsAreBlockedInEveryCall) {
  EchoSink::calls = EchoSink::calls_with_signals_blocked = 0;
  std::string error;
  auto one = open({}, &error);
  retrysafe_event event{};
  retrysafe_outcome outcomes[2];
  int timeout = -1;
  one->submit(event);
  one->flush();
  one->collect(outcomes, &timeout);
  one.reset();
  EXPECT_EQ(EchoSink::calls, 5);
  EXPECT_EQ(EchoSink::calls_with_signals_blocked, 5);
  EXPECT_FALSE(blocked(SIGTERM));
}

TEST(SinkHost, ExceptionsEndAtTheBorder) {
  std::string error;
  EXPECT_FALSE(open({{"broken", "true"}}, &error));
  EXPECT_EQ(error, "option \"broken\" is set");
  EXPECT_FALSE(open({{"number", "4x"}}, &error));
  EXPECT_EQ(error, "option \"number\" is not a number");

  const auto one = open({}, &error);
  retrysafe_event event{};
  event.tag = 13;
  EXPECT_FALSE(one->submit(event));
  EXPECT_EQ(last_log, "unlucky");
}

TEST(SinkHost, WhatASinkSaysHoldsNoSecrets) {
  std::string error;
  const auto one = open({}, &error);
  EchoSink::answer = "the server says: no hunter2 here";
  retrysafe_outcome outcomes[2];
  int timeout = -1;
  EXPECT_EQ(one->collect(outcomes, &timeout), 1u);
  EXPECT_STREQ(outcomes[0].reason, "the server says: no *** here");
  one->flush();
  EXPECT_EQ(last_log, "the server says: no *** here");
  EchoSink::answer.clear();
  EXPECT_FALSE(open({{"complain", "hunter2"}}, &error));
  EXPECT_EQ(error, "not ***");
}

TEST(SinkHost, ReasonsAreCutBetweenCharacters) {
  retrysafe_outcome outcome;
  sink::report(&outcome, 1, RETRYSAFE_DELIVERED, std::string(254, 'x') + "\xc3\xa9");
  EXPECT_EQ(std::string(outcome.reason), std::string(254, 'x'));
  sink::report(&outcome, 1, RETRYSAFE_DELIVERED, std::string(253, 'x') + "\xc3\xa9");
  EXPECT_EQ(std::string(outcome.reason).size(), 255u);
  sink::report(&outcome, 1, RETRYSAFE_DELIVERED);
  EXPECT_STREQ(outcome.reason, "");
}

TEST(SinkHost, LibrariesThatAreNone) {
  Folder folder;
  folder.write("retrysafe_text.so", "not a library");
  const std::string path = "/nowhere:" + folder.path;
  EXPECT_EQ(load_error("retrysafe_missing", {path, "/lib"}),
            "library \"retrysafe_missing.so\" is not installed in " + path);
  EXPECT_NE(load_error("retrysafe_text", {path, "/lib"}).find("could not load library \"retrysafe_text\": "),
            std::string::npos);
  EXPECT_NE(load_error("../retrysafe_text", {path, "/lib"}).find("plain name"), std::string::npos);
  EXPECT_NE(load_error("", {path, "/lib"}).find("plain name"), std::string::npos);
}

TEST(SinkHost, LibrariesThatAreNoSinks) {
  Folder folder;
  Dl_info library{};
  ASSERT_NE(dladdr(reinterpret_cast<void *>(&dlopen), &library), 0);
  ASSERT_EQ(symlink(library.dli_fname, (folder.path + "/retrysafe_c.so").c_str()), 0);
  EXPECT_EQ(load_error("retrysafe_c", {folder.path, "/lib"}),
            "library \"retrysafe_c\" is not a sink of retrysafe");
}

TEST(SinkHost, TheFolderOfTheServerStandsForItsMacro) {
  Folder folder;
  folder.write("retrysafe_text.so", "not a library");
  // Found, and therefore refused for what it is.
  for (const char *path : {"", "$libdir", "/nowhere:$libdir", "relative:$libdir/."})
    EXPECT_NE(load_error("retrysafe_text", {path, folder.path}).find("could not load"), std::string::npos)
        << path;
  EXPECT_NE(load_error("retrysafe_text", {"/nowhere", folder.path}).find("is not installed"),
            std::string::npos);
}
