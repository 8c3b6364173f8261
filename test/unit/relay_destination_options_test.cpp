// Options with secrets in files: which files the relay reads, and whose word counts.
#include "relay/destination_options.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

namespace retrysafe::relay {
namespace {

class RelayOptions : public ::testing::Test {
 protected:
  RelayOptions() {
    configuration.secret_directory = path + "/secrets";
    std::filesystem::create_directory(configuration.secret_directory);
  }
  ~RelayOptions() override { std::filesystem::remove_all(path); }

  void write(const std::string &file, const std::string &text) { std::ofstream(path + "/" + file) << text; }
  // What the database says the secret is in.
  std::string secret(const std::string &file) {
    return option_of_database("secret", file, "file", true, configuration);
  }
  std::string problem(const std::string &file) {
    try {
      secret(file);
    } catch (const ConfigurationError &error) {
      return error.what();
    }
    return {};
  }

  char name[32] = "/tmp/relay-options-test-XXXXXX";
  std::string path = mkdtemp(name);
  Configuration configuration;
};

TEST_F(RelayOptions, ASecretIsTheTextOfItsFile) {
  write("secrets/key", "sesame\r\n");
  EXPECT_EQ(secret("key"), "sesame");
  EXPECT_EQ(secret(path + "/secrets/key"), "sesame");
}

// Who may make destinations would have any file of this machine sent to him.
TEST_F(RelayOptions, NoFileOutsideOfTheDirectory) {
  write("key", "sesame");
  std::filesystem::create_symlink(path + "/key", path + "/secrets/link");
  for (const std::string &file : {std::string("../key"), std::string("link"), path + "/key"})
    EXPECT_EQ(problem(file), "option \"secret\" of the database names a file outside of secret_directory")
        << file;
}

TEST_F(RelayOptions, FilesThatHoldNoSecret) {
  std::filesystem::create_directory(path + "/secrets/folder");
  write("secrets/long", std::string(64 * 1024 + 1, 'x'));
  write("secrets/longest", std::string(64 * 1024, 'x'));
  write("secrets/empty", "\n");
  EXPECT_NE(problem("folder").find("is not a plain file"), std::string::npos);
  EXPECT_NE(problem("long").find("has more than 64 kB"), std::string::npos);
  EXPECT_EQ(problem("longest"), "");
  EXPECT_NE(problem("empty").find("is empty or not text"), std::string::npos);
}

TEST(RelayOptionsMerged, OneReplacesTheOther) {
  Options options{{"url", "a"}, {"timeout", "1s"}};
  merge({{"mode", "binary"}, {"url", "b"}}, &options);
  EXPECT_EQ(options, (Options{{"url", "b"}, {"timeout", "1s"}, {"mode", "binary"}}));
}

}  // namespace
}  // namespace retrysafe::relay
