// Door: where the launchers of other hosts come in.
//
// Whoever connects has a few seconds to prove that it knows the secret. Strangers are told nothing,
// hold up nobody, and keep no host out, however many they are.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "launch/connection.h"
#include "launch/output.h"
#include "launch/run_options.h"
#include "launch/tls.h"

namespace lockstep {

inline constexpr auto kProofDeadline = std::chrono::seconds(5);  // for a newcomer to prove itself

class Door {
 public:
  struct Callbacks {
    // From one that knows the secret.
    std::function<void(const std::shared_ptr<Connection>&, const Json&)> received;
    // One that had sent a message is gone.
    std::function<void(const std::shared_ptr<Connection>&, const std::string& reason)> closed;
  };

  // Listens at the address of --master. Throws: UsageError, SystemError.
  Door(EventLoop& loop, Output& output, const RunOptions& options, Callbacks callbacks);
  ~Door();
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // Shows the first of those that were turned away.
  void refuse(const std::string& who, const std::string& reason);

 private:
  // One that has connected, and has not sent a message.
  struct Newcomer {
    std::shared_ptr<Connection> connection;
    EventLoop::Timer deadline;
    std::string network;  // where it comes from
  };

  void watch_listener();
  void accept_one();
  bool forget(int number);
  void make_room();

  EventLoop& loop_;
  Output& output_;
  const Callbacks callbacks_;
  const Tls tls_;
  Fd listener_;
  std::map<int, Newcomer> newcomers_;  // by number
  int num_newcomers_ = 0;
  int num_refused_ = 0;
};

}  // namespace lockstep
