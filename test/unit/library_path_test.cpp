// Where libraries are found.
#include "core/library_path.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace retrysafe {
namespace {

class LibraryPathTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/library_path_XXXXXX";
    ASSERT_TRUE(mkdtemp(name));
    folder_ = name;
    std::filesystem::create_directory(folder_ + "/sub");
    for (const char *file : {"/here.so", "/sub/below.so"}) std::ofstream(folder_ + file) << "x";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string file(std::string_view library, std::string_view path) {
    find_library(library, {path, folder_}, &search_);
    return search_.file;
  }

  std::string folder_;
  LibrarySearch search_;
};

TEST_F(LibraryPathTest, TheFolderOfTheServerStandsForItsMacro) {
  for (const char *path : {"", "$libdir", "/nowhere:$libdir", "$libdir:/nowhere"})
    EXPECT_EQ(file("here", path), folder_ + "/here.so") << path;
  EXPECT_EQ(file("below", "$libdir:$libdir/sub"), folder_ + "/sub/below.so");
  EXPECT_EQ(file("here", folder_), folder_ + "/here.so");
}

TEST_F(LibraryPathTest, TellsWhereItLooked) {
  EXPECT_EQ(file("missing", "/nowhere:$libdir/sub:relative:$libdirs:$libdir"), "");
  EXPECT_EQ(search_.folders, "/nowhere:" + folder_ + "/sub:" + folder_);
  EXPECT_EQ(file("here", "/nowhere"), "");
  EXPECT_STREQ(search_.folders, "/nowhere");
}

TEST_F(LibraryPathTest, PathsThatAreTooLongAreNoFiles) {
  EXPECT_EQ(file("here", "/" + std::string(5000, 'x')), "");
  EXPECT_EQ(file("here", "/" + std::string(5000, 'x') + ":$libdir"), folder_ + "/here.so");
}

}  // namespace
}  // namespace retrysafe
