// Templates of topics and the like: what is one, and what an event makes of it.
#include "core/route_template.hpp"

#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <string>

namespace retrysafe {
namespace {

retrysafe_text text(std::string_view view) {
  return {view.data(), view.size()};
}

struct Event {
  std::string_view type = "order.paid";
  retrysafe_text ordering_key{nullptr, 0};
  std::map<std::string_view, std::string_view> headers{};
};

// The place, or "! " and the reason.
std::string expand(std::string_view pattern, const Event &given) {
  std::vector<retrysafe_pair> headers;
  for (const auto &[name, value] : given.headers) headers.push_back({text(name), text(value)});
  retrysafe_event event{};
  event.type = text(given.type);
  event.ordering_key = given.ordering_key;
  event.headers = headers.data();
  event.header_count = headers.size();
  std::string name = "left over";
  std::string reason;
  if (RouteTemplate(pattern).expand(event, &name, &reason)) return name;
  return "! " + reason;
}

TEST(RouteTemplate, TextStandsForItself) {
  EXPECT_EQ(expand("orders", {}), "orders");
  EXPECT_EQ(expand("a:b/ü", {}), "a:b/ü");
}

TEST(RouteTemplate, PlaceholdersAreReplaced) {
  const Event event{.ordering_key = text("o-7"), .headers = {{"Tenant", "acme"}, {"x_y-Z", "1"}}};
  EXPECT_EQ(expand("{type}", event), "order.paid");
  EXPECT_EQ(expand("s.{type}.{ordering_key}.{header:Tenant}!", event), "s.order.paid.o-7.acme!");
  EXPECT_EQ(expand("{type}{type}", event), "order.paidorder.paid");
  EXPECT_EQ(expand("{header:tenant}{header:X_Y-z}", event), "acme1") << "case does not matter";
}

TEST(RouteTemplate, WhatIsPutInIsNotLookedAtAgain) {
  EXPECT_EQ(expand("{type}", {.type = "{ordering_key}}}"}), "{ordering_key}}}");
}

TEST(RouteTemplate, DoubledBracesAreBraces) {
  EXPECT_EQ(expand("{{type}}", {}), "{type}");
  EXPECT_EQ(expand("{{{type}}}", {}), "{order.paid}");
  EXPECT_EQ(expand("{{", {}), "{");
}

TEST(RouteTemplate, WhatTheEventLacksIsAReason) {
  EXPECT_EQ(expand("a.{ordering_key}", {}), "! the event has no ordering key, which its route is made from");
  EXPECT_EQ(expand("{header:tenant}", {.headers = {{"tenant2", "x"}}}),
            "! the event has no header \"tenant\", which its route is made from");
}

TEST(RouteTemplate, AnEmptyRouteIsAReason) {
  const Event event{.type = "", .ordering_key = text(""), .headers = {{"h", ""}}};
  for (const char *pattern : {"{type}", "{ordering_key}", "{header:h}{type}"})
    EXPECT_EQ(expand(pattern, event), "! the route of the event is empty") << pattern;
  EXPECT_EQ(expand("a{header:h}b", event), "ab") << "empty parts are allowed";
}

TEST(RouteTemplate, Syntax) {
  for (const char *good : {"a", "{type}", "{ordering_key}", "{header:X-1_y}", "}}{{", "a{{b}}c"})
    EXPECT_TRUE(is_route_template(good)) << good;
  for (const char *bad :
       {"", "{", "}", "a}b", "{}", "{type", "{ type}", "{Type}", "{key}", "{header:}", "{header:a b}",
        "{header:a{type}}", "{header}", "{{type}", "{type}}", "{{{type}}"}) {
    EXPECT_FALSE(is_route_template(bad)) << bad;
    EXPECT_THROW(RouteTemplate{bad}, std::invalid_argument) << bad;
  }
}

const char *no_blanks(std::string_view name) {
  return name.find(' ') == std::string_view::npos ? nullptr : "has a blank";
}

TEST(RouteTemplate, NamesThatTheRuleForbids) {
  retrysafe_event event{};
  event.type = {"a b", 3};
  std::string name, reason;
  EXPECT_FALSE(RouteTemplate("x.{type}", no_blanks).expand(event, &name, &reason));
  EXPECT_EQ(reason, "\"x.a b\" has a blank");
  const std::string long_name(98, 'x');
  EXPECT_FALSE(RouteTemplate(long_name + "{type}", no_blanks).expand(event, &name, &reason));
  EXPECT_EQ(reason, "a name of 101 bytes has a blank");
  EXPECT_TRUE(RouteTemplate("x.{type}").expand(event, &name, &reason));
  EXPECT_FALSE(RouteTemplate("x y.{type}", no_blanks).problem()) << "only constants are judged";
  EXPECT_STREQ(RouteTemplate("x {{y}}", no_blanks).problem(), "has a blank");
  EXPECT_FALSE(RouteTemplate("x", no_blanks).problem());
  EXPECT_FALSE(RouteTemplate("x y").problem());
}

TEST(RouteTemplate, KnowsWhetherEveryEventGoesToTheSamePlace) {
  EXPECT_TRUE(RouteTemplate("a{{b}}").is_constant());
  EXPECT_FALSE(RouteTemplate("a{type}").is_constant());
  EXPECT_FALSE(RouteTemplate("{header:a}").is_constant());
}

}  // namespace
}  // namespace retrysafe
