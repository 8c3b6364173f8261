// Connection strings of the relay.
#include "relay/session.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>

#include "relay/configuration.hpp"

namespace retrysafe::relay {
namespace {

TEST(RelayHosts, EachHostByItself) {
  const Hosts hosts("host=a,b,c port=5432 connect_timeout=3");
  EXPECT_EQ(hosts.count(), 3u);
  EXPECT_EQ(hosts.timeout(), 3000);
  EXPECT_FALSE(hosts.has_password());
  EXPECT_TRUE(Hosts("postgresql://me:secret@a/shop").has_password());
  EXPECT_TRUE(Hosts("host=a sslkey=/key sslpassword=secret").has_password());
}

TEST(RelayHosts, AddressesCountAsHosts) {
  EXPECT_EQ(Hosts("hostaddr=10.0.0.1,10.0.0.2 port=5432").count(), 2u);
  EXPECT_EQ(Hosts("host=a,b hostaddr=10.0.0.1,10.0.0.2").count(), 2u);
}

TEST(RelayHosts, OfTheEnvironment) {
  setenv("PGHOST", "a,b,c", 1);
  EXPECT_EQ(Hosts("dbname=shop").count(), 3u);
  EXPECT_EQ(Hosts("host=a dbname=shop").count(), 1u);
  unsetenv("PGHOST");
  setenv("PGHOSTADDR", "10.0.0.1,10.0.0.2", 1);
  EXPECT_EQ(Hosts("dbname=shop").count(), 2u);
  unsetenv("PGHOSTADDR");
}

// The environment may name another service, and does so afterwards too.
TEST(RelayHosts, OfAService) {
  char file[] = "/tmp/relay-session-test-XXXXXX";
  close(mkstemp(file));
  std::ofstream(file) << "[shop]\nhost=a,b\n[other]\nhost=a,b,c,d\n";
  setenv("PGSERVICEFILE", file, 1);
  EXPECT_EQ(Hosts("service=shop").count(), 2u);
  EXPECT_EQ(getenv("PGSERVICE"), nullptr);
  setenv("PGSERVICE", "other", 1);
  EXPECT_EQ(Hosts("service=shop").count(), 2u);
  EXPECT_STREQ(getenv("PGSERVICE"), "other");
  EXPECT_EQ(Hosts("dbname=shop").count(), 4u);
  unsetenv("PGSERVICE");
  unsetenv("PGSERVICEFILE");
  unlink(file);
}

TEST(RelayHosts, ATimeoutThatIsNone) {
  const Milliseconds otherwise = Hosts("host=a").timeout();
  for (const char *none : {"0", "-1", "soon"})
    EXPECT_EQ(Hosts(std::string("host=a connect_timeout=") + none).timeout(), otherwise) << none;
}

TEST(RelayHosts, AVeryLongTimeoutIsADay) {
  for (const char *seconds : {"86400", "3000000", "4294968", "99999999999999999999"})
    EXPECT_EQ(Hosts(std::string("host=a connect_timeout=") + seconds).timeout(), 86'400'000) << seconds;
}

TEST(RelayHosts, RefusesWithoutRepeatingWhatWasWritten) {
  try {
    const Hosts hosts("host=a password='secret");
    FAIL();
  } catch (const ConfigurationError &error) {
    EXPECT_EQ(std::string(error.what()).find("secret"), std::string::npos);
  }
}

}  // namespace
}  // namespace retrysafe::relay
