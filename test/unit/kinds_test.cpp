// The kinds that come with the extension: their lists are consistent.
#include "core/kinds/kinds.hpp"

#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>

namespace retrysafe {
namespace {

TEST(Kinds, EachHasAConsistentList) {
  for (const BuiltInKind *kind : built_in_kinds()) {
    for (const OptionDescription &option : kind->options) {
      OptionProblem problem{};
      EXPECT_TRUE(check_description(option, &problem)) << kind->name << ": " << problem.message;
      EXPECT_FALSE(option.description.empty()) << kind->name << "." << option.name;
      EXPECT_EQ(find_option(kind->options, option.name).description, &option) << "named twice";
      std::istringstream needs{std::string(option.needs)};
      for (std::string other; std::getline(needs, other, '|');)
        EXPECT_TRUE(find_option(kind->options, other).description) << option.name << " needs " << other;
    }
  }
}

TEST(Kinds, AreFoundByName) {
  std::set<std::string_view> names;
  for (const BuiltInKind *kind : built_in_kinds()) {
    EXPECT_EQ(find_built_in_kind(kind->name), kind) << kind->name;
    EXPECT_TRUE(names.insert(kind->name).second) << kind->name;
  }
  EXPECT_FALSE(find_built_in_kind("carrier pigeon"));
  EXPECT_STREQ(find_built_in_kind("http")->library, "retrysafe_http");
  EXPECT_EQ(find_built_in_kind("pull")->library, nullptr);
}

}  // namespace
}  // namespace retrysafe
