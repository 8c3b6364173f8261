#include "core/event_source.hpp"

#include <gtest/gtest.h>

#include <string>

namespace retrysafe {
namespace {

std::string source(std::string_view database, std::string_view scope) {
  std::string out(event_source_capacity(database, scope), '!');
  const size_t size = event_source(database, scope, out.data());
  EXPECT_LE(size, out.size());
  return out.substr(0, size);
}

TEST(EventSource, NamesDatabaseAndScope) {
  EXPECT_EQ(source("shop", ""), "retrysafe/shop");
  EXPECT_EQ(source("shop", "orders"), "retrysafe/shop/orders");
}

TEST(EventSource, IsAUriReference) {
  EXPECT_EQ(source("my db", "a/b?c#%"), "retrysafe/my%20db/a%2Fb%3Fc%23%25");
  EXPECT_EQ(source("\xc3\xa9", "x"), "retrysafe/%C3%A9/x");
}

}  // namespace
}  // namespace retrysafe
