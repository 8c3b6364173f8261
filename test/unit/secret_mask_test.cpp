// What a far side repeats of a secret is not shown.
#include "core/secret_mask.hpp"

#include <gtest/gtest.h>

namespace retrysafe {
namespace {

std::string masked(std::initializer_list<std::string_view> secrets, std::string text) {
  SecretMask mask;
  for (std::string_view secret : secrets) mask.add(secret);
  mask.apply(&text);
  return text;
}

TEST(SecretMask, EverywhereInTheText) {
  EXPECT_EQ(masked({"hunter2"}, "no hunter2 here: 'hunter2hunter2'"), "no *** here: '******'");
  EXPECT_EQ(masked({}, "no hunter2"), "no hunter2");
  EXPECT_EQ(masked({"hunter2"}, ""), "");
}

TEST(SecretMask, TheLongerOneFirst) {
  EXPECT_EQ(masked({"hunter", "hunter2"}, "hunter2!"), "***!");
}

TEST(SecretMask, EachWordOfSeveral) {
  EXPECT_EQ(masked({"Bearer abcdefgh"}, "bad token abcdefgh, Bearer it was"), "bad token ***, Bearer it was");
}

TEST(SecretMask, AsItIsShown) {
  EXPECT_EQ(masked({"two  blanks"}, "not two blanks!"), "not ***!");
}

TEST(SecretMask, WhatACutLeftOfIt) {
  EXPECT_EQ(masked({"hunter2"}, "refused: hunt"), "refused: ***");
  EXPECT_EQ(masked({"hunter2"}, "refused: hun"), "refused: hun");
}

TEST(SecretMask, TooShortToHide) {
  EXPECT_EQ(masked({"", "a", "abc"}, "abc and a"), "abc and a");
}

}  // namespace
}  // namespace retrysafe
