// FakeSystem: a tree of files that stands for /proc, /sys and /dev of another machine.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace lockstep::test {

// In a folder that is gone at the end.
class FakeSystem {
 public:
  FakeSystem() {
    std::string name = testing::TempDir() + "lockstep-system-XXXXXX";
    root_ = ::mkdtemp(name.data());
  }
  ~FakeSystem() {
    if (!root_.empty()) std::filesystem::remove_all(root_);
  }
  FakeSystem(FakeSystem&& other) noexcept : root_(std::exchange(other.root_, {})) {}
  FakeSystem& operator=(FakeSystem&&) = delete;

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text << '\n';
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

}  // namespace lockstep::test
