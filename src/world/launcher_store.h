// LauncherStore: the store of a job that `lockstep run` started on several hosts. Questions go to
// this host's launcher, through a descriptor that it passed on, and from there to the first host's.
//
// A question is a JSON value as CBOR behind its length in 4 bytes, the highest first; so is the
// answer (launch/key_value.h says which there are). Threading: safe; clones share the descriptor
// and take turns, and waiting means asking again and again, so nobody waits for another's turn
// long.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/json.h"
#include "base/mutex.h"
#include "base/posix.h"

namespace lockstep {

class LauncherStore : public c10d::Store {
 public:
  LauncherStore(Fd socket, std::chrono::milliseconds timeout);

  c10::intrusive_ptr<Store> clone() override;
  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  std::vector<std::string> listKeys() override;

  // Any question that launchers know (launch/key_value.h, launch/elastic.h).
  Json ask(const Json& question);

 private:
  struct Line {  // shared by clones
    Mutex mutex;
    Fd socket LOCKSTEP_GUARDED_BY(mutex);
  };
  LauncherStore(std::shared_ptr<Line> line, std::chrono::milliseconds timeout);

  std::shared_ptr<Line> line_;
};

}  // namespace lockstep
