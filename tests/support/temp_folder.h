// A folder that is gone at the end of the process that made it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

namespace lockstep::test {

// Ranks that are started anew find it by the variable.
class TempFolder {
 public:
  explicit TempFolder(const char* variable = "LOCKSTEP_TEST_FOLDER") : variable_(variable) {
    if (const char* given = std::getenv(variable)) {
      path_ = given;
      return;
    }
    std::string name = testing::TempDir() + "lockstep-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
    is_mine_ = true;
  }
  ~TempFolder() {
    if (is_mine_) std::filesystem::remove_all(path_);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::map<std::string, std::string> variables() const { return {{variable_, path_}}; }

 private:
  const char* variable_;
  std::string path_;
  bool is_mine_ = false;
};

}  // namespace lockstep::test
